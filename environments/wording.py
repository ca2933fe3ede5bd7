"""Checks of the text of a new task, which an explorer model may have written.

The text must ask for something that its solution does, and must not contain a piece of code or a
call. The checks only compare words, so they are sometimes wrong. A wrong rejection costs a
proposal, but no episode.
"""

import json
import re

# Common words of requests, which do not show what a request is about
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
    """Returns True if a text asks for something that can be checked.

    Args:
        text: The text of a task.
        about: A description of what its solution does. The text must share a word with it.
    """
    return bool((stems(text) & stems(about)) - stems(EMPTY))


def stems(text: str) -> set[str]:
    """Returns the first five letters of each word in a text. A name such as `getUserName` counts as
    its parts, and a final s is removed, so that other endings of a word match."""
    words = re.findall(r"[^\W\d_]+|\d+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower())
    return {word.rstrip("s")[:5] for word in words}


def tokens(text: str) -> set[str]:
    """Returns the words and numbers of a text. Month names and the words for 0 to 12 are included
    as numbers as well."""
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


# Patterns of code, in this order: a code fence, a tag, an AppWorld interface, the arguments of a
# call, a key and value of JSON, an index by a string, a print
CODE = (r"""```|</?tool_call>|\bapis\s*[.\[]|\barguments\W*:|["']\w+["']\s*:\s*["'\[{\d]"""
        r"""|\w\[["']|\bprint\(""")


def holds_code(text: str, values: list) -> bool:
    """Returns True if a text contains a piece of code or a call.

    Args:
        text: The text of a task.
        values: Values that the text has to contain. They may look like code, so they are removed.
    """
    for value in values:
        for written in (str(value), json.dumps(value, ensure_ascii=False)):
            if re.search(CODE, written):
                text = text.replace(written, " ")
    return bool(re.search(CODE, text))


def holds_call(text: str, name: str, document: str, arguments: dict) -> bool:
    """Returns True if a text contains a call of a function, or names the function.

    Args:
        text: The text of a task.
        name: The name of the function.
        document: The description of the function. If the name is a word of it, people also use that
            word for the purpose, so the word alone is allowed in the text.
        arguments: The arguments of the call.
    """
    parts = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).split("_")
    name = re.escape(name)
    forms = [rf"[`'\"]{name}[`'\"]", rf"\b{name}[(\[{{<>=|&]"]
    forms += [rf"\b{re.escape(argument)}=\S" for argument in arguments]
    if len(parts) > 1:  # a name of several parts is no word that people use
        forms.append(rf"\b{'[_-]?'.join(map(re.escape, parts))}\b")
    elif not re.search(rf"\b{name}\b", document, re.I):
        # The name followed by an argument, as in a shell
        first = "|".join(re.escape(str(value)) for value in (*arguments, *leaves(arguments)))
        forms.append(rf"\b{name}\b\W*(?:{first})(?!\w)")
    return bool(re.search("|".join(forms), text, re.I))


def with_pairs(names: list[str]) -> set[str]:
    """Returns the names, and each pair of consecutive names in the form "a, b"."""
    return {*names, *(f"{a}, {b}" for a, b in zip(names, names[1:]))}


def leaves(value) -> list:
    """Returns all strings and numbers in a JSON value, at any depth."""
    if isinstance(value, (dict, list)):
        items = value.values() if isinstance(value, dict) else value
        return [leaf for item in items for leaf in leaves(item)]
    return [] if value is None or isinstance(value, bool) else [value]
