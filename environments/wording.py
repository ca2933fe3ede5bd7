"""What the text of a new task must say, and must not hold: an explorer model wrote it, and code
cannot read. Words are compared, so that these rules err; that costs proposals, no episodes."""

import json
import re

# Words of any wish, which say nothing of this one.
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
    """Whether a text asks for something checkable: it has a word of what is to be done."""
    return bool((stems(text) & stems(about)) - stems(EMPTY))


def stems(text: str) -> set[str]:
    """The beginnings of a text's words and of the parts of its names, whatever their ends."""
    words = re.findall(r"[^\W\d_]+|\d+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower())
    return {word.rstrip("s")[:5] for word in words}


def tokens(text: str) -> set[str]:
    """The words and numbers of a text; months and small numbers that are words also as numbers."""
    text = re.sub(r"\\[nrt]", " ", re.sub(r"(?<=\d),(?=\d{3})", "", text))
    found = set()
    for word in re.findall(r"\d+(?:\.\d+)?|[^\W\d_]+", text.lower()):
        if word[0].isdecimal():
            word = f"{float(word):.15g}"
        found.add(word)
        if word in NUMBERS:
            found.add(str(NUMBERS.index(word)))
        if word[:3] in MONTHS:
            found.add(str(MONTHS.index(word[:3]) + 1))
    return found


# A fence, a tag, an interface, a call's arguments, a pair of JSON, a key of a record, a print.
CODE = (r"""```|</?tool_call>|\bapis\s*[.\[]|\barguments\W*:|["']\w+["']\s*:\s*["'\[{\d]"""
        r"""|\w\[["']|\bprint\(""")


def holds_code(text: str, values: list) -> bool:
    """Whether a text holds a piece of code or a call, whatever it does. Values that it has to hold
    may look like one."""
    for value in values:
        for written in (str(value), json.dumps(value, ensure_ascii=False)):
            if re.search(CODE, written):
                text = text.replace(written, " ")
    return bool(re.search(CODE, text))


def holds_call(text: str, name: str, document: str, arguments: dict) -> bool:
    """Whether a text holds a call, or a part of it that names what is called.

    Args:
        text: the text.
        name: of what is called.
        document: what it does, in words; where its name is one of them, people say it, too.
        arguments: those of the call.
    """
    parts = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).split("_")
    name = re.escape(name)
    forms = [rf"[`'\"]{name}[`'\"]", rf"\b{name}[(\[{{<>=|&]"]
    forms += [rf"\b{re.escape(argument)}=\S" for argument in arguments]
    if len(parts) > 1:  # nobody says it
        forms.append(rf"\b{'[_-]?'.join(map(re.escape, parts))}\b")
    elif not re.search(rf"\b{name}\b", document, re.I):  # as in a shell: the call without its signs
        first = "|".join(re.escape(str(value)) for value in (*arguments, *leaves(arguments)))
        forms.append(rf"\b{name}\b\W*(?:{first})(?!\w)")
    return bool(re.search("|".join(forms), text, re.I))


def with_pairs(names: list[str]) -> set[str]:
    """Returns the names, and each two that follow one another, as "a, b"."""
    return {*names, *(f"{a}, {b}" for a, b in zip(names, names[1:]))}


def leaves(value) -> list:
    """The texts and numbers in a value of JSON."""
    if isinstance(value, (dict, list)):
        inside = value.values() if isinstance(value, dict) else value
        return [found for item in inside for found in leaves(item)]
    return [] if value is None or isinstance(value, bool) else [value]
