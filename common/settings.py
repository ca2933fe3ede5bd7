"""How settings are stated, checked and read from a command line; of a run and of an environment.

A setting is a field of a frozen dataclass; the comment behind or above it is the help, the type
(a plain one, Literal, Optional[str], or one of those below) has the limits:

    beta: Rate = 0.1  # in iteration 1 [App. B; ETO]
"""

import argparse
import inspect
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Optional, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import unquote


class Refused(ValueError):
    """What the user gave cannot be used; the text is one line: object, value, remedy."""


@dataclass(frozen=True)
class Limits:
    """What a value has to be: a test of the value and of all settings, and its words."""
    holds: Callable = lambda value, s: True
    words: str = ""
    free: bool = False         # it changes nothing in the files of a run but rounding
    password: str | None = None  # the environment variable for an address's password


def limited(hint, words: str, holds: Callable, **more):
    """The type of values, of the type `hint`, for which holds(value) is true."""
    return Annotated[hint, Limits(lambda value, s: value is None or holds(value), words, **more)]


Kind = TypeVar("Kind")
Free = Annotated[Kind, Limits(free=True)]
Whole = limited(int, "must be at least 0", lambda n: n >= 0)
Count = limited(int, "must be at least 1", lambda n: n >= 1)
Rate = limited(float, "must be above 0", lambda x: x > 0)
Weight = limited(float, "must be at least 0", lambda x: x >= 0)
Share = limited(float, "must be at least 0 and below 1", lambda x: 0 <= x < 1)
OldFile = limited(Optional[str], "is not there; give a file or folder that is",
                  lambda name: Path(name).exists())
# Of a real environment: not for the tiny model, which knows the words of the built-in ones alone.
REAL = Limits(lambda value, s: not value or s.model != "tiny",
              "is for a real language model; give another --model than tiny")
FINITE = Limits(lambda value, s: not isinstance(value, float) or math.isfinite(value),
                "must be a finite number")


class Stated:
    """What a class of settings may state beside its fields."""
    presets = {}  # name -> values that replace the defaults, if `preset_names` has the name

    @staticmethod
    def preset_names(values: dict) -> list[str]:
        """The presets for these values, each of which beats those before."""
        model, protocol = values["model"], values.get("protocol", "ours")
        return ["", model, protocol, f"{model} {protocol}"]

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        """(whether it is so, flags, what is wrong) of values; s: all settings of the run."""
        return []


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise Refused(f"{message}; --help lists every setting")


def parse(argv: list[str], kind: type, methods: dict, environment: Callable):
    """(settings, the environment's own options) of a command line; --help prints them. kind: the
    class of settings; methods: name -> (loop, the classes or names of settings that it reads);
    environment(name) -> the class of options. Refused where anything is wrong."""
    first, parser = (Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
                     for _ in range(2))  # what they return was given
    first.add_argument("--env", default=kind.env)
    options = environment(first.parse_known_args(argv)[0].env)
    stated = (*fields(kind), *fields(options))
    hints = get_type_hints(kind) | get_type_hints(options)
    for f in stated:
        hint = {Optional[str]: str}.get(hints[f.name], hints[f.name])
        parser.add_argument(flag(f.name), **(
            dict(choices=tuple(methods)) if f.name == "method" else
            dict(choices=get_args(hint)) if get_origin(hint) is Literal else
            dict(type=str.lower, choices=("true", "false"), nargs="?", const="true")
            if hint is bool else dict(type=hint)))
    asks = {"-h", "--help"} & {*argv}
    given = vars(parser.parse_args([word for word in argv if word not in asks]))
    given |= {name: text == "true" for name, text in given.items() if hints[name] is bool}
    values = {f.name: f.default for f in stated}
    for name in kind.preset_names(values | given):
        values |= kind.presets.get(name, {}) | options.presets.get(name, {})
    values |= given  # presets also name settings of what extends a program
    s, own = (part(**{f.name: values[f.name] for f in fields(part)}) for part in (kind, options))
    reads = {name for part in methods[s.method][1] for name in (
        [part] if isinstance(part, str) else [f.name for f in fields(part)])}
    reads |= {f.name for f in fields(options)}
    if asks:
        help = comments(kind, options)
        print("\n".join(f"{flag(f.name)} {values[f.name]}: {help.get(f.name)}"
                        for f in stated if f.name in reads))
        sys.exit()
    wrong = [f"{flag(name)} is not read by --method {s.method}" for name in given
             if name not in reads]
    wrong += [f"{flag(f.name)} {values[f.name]}: {limits.words}" for part in (kind, options)
              for f in fields(part) if f.name in reads
              for limits in (FINITE, *limits_of(part, f.name))
              if not limits.holds(values[f.name], s)]
    wrong += [f"{flags}: {problem}" for so, flags, problem in (*s.conflicts(s), *own.conflicts(s))
              if so]
    if wrong:
        raise Refused("; ".join(wrong))
    for f in fields(options):  # settings are written: no password in them
        for variable in filter(None, (l.password for l in limits_of(options, f.name))):
            if parts := re.fullmatch("(.+?//[^:@]+):([^@/]*)(@.+)", values[f.name] or ""):
                own = replace(own, **{f.name: parts[1] + parts[3]})
                os.environ[variable] = unquote(parts[2])
    return s, own


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@cache
def limits_of(kind: type, name: str) -> tuple[Limits, ...]:
    return getattr(get_type_hints(kind, include_extras=True)[name], "__metadata__", ())


def check_same(before: dict | None, now: dict, kind: type) -> None:
    """Refused where a run that goes on has other settings than before, but for the free ones."""
    if before is None:
        raise Refused("--out: the config.json of this folder is no run's; give another folder")
    free = {f.name for f in fields(kind) if any(l.free for l in limits_of(kind, f.name))}
    if changed := [f"{name} ({before.get(name)} -> {now.get(name)})" for name in {**before, **now}
                   if before.get(name) != now.get(name) and name not in free]:
        raise Refused(f"--out: this folder was made with other settings: {', '.join(changed)}; "
                      "give another, or these settings again")


def comments(*kinds: type) -> dict[str, str]:
    """Each field's comment in the source: behind it, or in the lines above."""
    found = {}
    for kind in {part: None for whole in kinds for part in whole.__mro__[-2::-1]}:
        above = []
        for line in inspect.getsource(kind).splitlines():
            code, _, text = line.strip().partition("#")
            if code and (field := re.match(r"(\w+):", code)):
                found[field[1]] = text.strip() or " ".join(above)
            above = [*above, text.strip()] if text and not code else []
    return found
