"""Checks the text of a new task. An explorer model may have written the text.

The text must ask for something that the task's solution does. The text must not contain code or a
function call, because these reveal the solution. The checks only compare words, so they are
sometimes wrong. A wrong rejection costs little, because it wastes a proposal but no episode.
"""

import json
import re

# These words occur in requests of any kind, so they do not show what a request is about.
EMPTY = """a about action actions ahead all also an and answer any anything app are as ask asked
    assist at available be been by call can care carry change code command complete could current do
    does done each every everything execute existing finish fix for from fulfil function get give
    given go goal handle has have help here how i if in information is it its job just kindly last
    like make me method my necessary need needed now of on operation or out perform please process
    provide provided question request require result return run said same say should so solve some
    something state step such take task tell thank that the them then these they thing this those to
    tool use used user using usual want was way we were what whatever when where which will with
    work would you your"""
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()
MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()


def asks(text: str, about: str) -> bool:
    """Returns True if the text of a task asks for something that its solution does.

    The text and the description of the solution must share a word that is not in EMPTY. Words are
    compared by their stems.

    Args:
        text: The text of a task.
        about: A description of the task's solution, such as its calls as JSON.
    """
    return bool((stems(text) & stems(about)) - stems(EMPTY))


def stems(text: str) -> set[str]:
    """Returns the set of word stems in a text.

    To get its stem, a word is converted to lower case, the letter s is removed from its end, and
    the word is cut to five letters. Words with different endings, such as "orders" and "ordered",
    therefore have the same stem. A name such as `getUserName` is split into the words get, user and
    name.
    """
    words = re.findall(r"[^\W\d_]+|\d+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower())
    return {word.rstrip("s")[:5] for word in words}


def tokens(text: str) -> set[str]:
    """Returns the set of words and numbers in a text.

    For a month name or a number word from zero to twelve, the set also contains the number. For
    example, "march" adds "3", and "two" adds "2".
    """
    text = re.sub(r"\\[nrt]", " ", re.sub(r"(?<=\d),(?=\d{3})", "", text))
    words = set()
    for word in re.findall(r"\d+(?:\.\d+)?|[^\W\d_]+", text.lower()):
        if word[0].isdecimal():
            word = f"{float(word):.15g}"
        words.add(word)
        if word in NUMBERS:
            words.add(str(NUMBERS.index(word)))
        if word[:3] in MONTHS:
            words.add(str(MONTHS.index(word[:3]) + 1))
    return words


# This pattern matches pieces of code. Its alternatives match, in this order: a code fence, a
# <tool_call> tag, AppWorld's `apis`, the word "arguments" with a colon, a JSON key with its value,
# an index that is a string, and a call of print.
CODE = (r"""```|</?tool_call>|\bapis\s*[.\[]|\barguments\W*:|["']\w+["']\s*:\s*["'\[{\d]"""
        r"""|\w\[["']|\bprint\(""")


def holds_code(text: str, values: list) -> bool:
    """Returns True if a text contains a piece of code, such as a function call.

    Args:
        text: The text of a task.
        values: The values in the solution that the text must contain, such as a file name. If a
            value looks like code, the value is removed from the text before the check.
    """
    for value in values:
        for written in (str(value), json.dumps(value, ensure_ascii=False)):
            if re.search(CODE, written):
                text = text.replace(written, " ")
    return bool(re.search(CODE, text))


def holds_call(text: str, name: str, document: str, arguments: dict) -> bool:
    """Returns True if a text contains a call of a function, or mentions the function by name.

    Args:
        text: The text of a task.
        name: The name of the function.
        document: The description of the function. If the name is a single word, such as "copy", and
            the description contains this word, the text may use it as an ordinary word. Even "copy
            a.txt" then does not count as a call.
        arguments: The arguments of the call.
    """
    parts = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).split("_")
    name = re.escape(name)
    forms = [rf"[`'\"]{name}[`'\"]", rf"\b{name}[(\[{{<>=|&]"]
    forms += [rf"\b{re.escape(argument)}=\S" for argument in arguments]
    if len(parts) > 1:  # users do not write names of several parts, such as get_user_name
        forms.append(rf"\b{'[_-]?'.join(map(re.escape, parts))}\b")
    elif not re.search(rf"\b{name}\b", document, re.I):
        # Also match the name if an argument follows it, as in a shell command.
        first = "|".join(re.escape(str(value)) for value in (*arguments, *leaves(arguments)))
        forms.append(rf"\b{name}\b\W*(?:{first})(?!\w)")
    return bool(re.search("|".join(forms), text, re.I))


def with_pairs(names: list[str]) -> set[str]:
    """Returns a set of all names and all pairs of consecutive names. A pair is a string such as
    "a, b" for the names a and b."""
    return {*names, *(f"{a}, {b}" for a, b in zip(names, names[1:]))}


def leaves(value) -> list:
    """Returns all strings and numbers in a JSON value, including those in nested lists and
    objects."""
    if isinstance(value, (dict, list)):
        items = value.values() if isinstance(value, dict) else value
        return [leaf for item in items for leaf in leaves(item)]
    return [] if value is None or isinstance(value, bool) else [value]
