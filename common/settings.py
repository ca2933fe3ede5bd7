"""Settings: how they are stated, read from a command line, explained by --help, and checked.

A setting is a field of a frozen dataclass. Its comment, in the lines above or behind it, explains
it in a sentence and ends with the source of its default in brackets. Its type says which values it
may have: a plain type, a Literal, Optional[str], or one of those below.

    # Beta of Eq. (7) in iteration 1 [App. B; ETO]
    beta: Rate = 0.1

The first line of a class's docstring is the heading of its settings in --help.
"""

import argparse
import inspect
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import (
    Annotated,
    Literal,
    NamedTuple,
    Optional,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)


class UsageError(ValueError):
    """What the user gave cannot be used; the text is one line: object, value, remedy."""


# ------------------------------------------------------------------------------- types of values


@dataclass(frozen=True)
class Limits:
    """What a value has to be, beside its type."""
    holds: Callable  # holds(value, all settings of the run) -> bool
    words: str       # what is said of a value where that is false


FREE = "free"        # marks what changes nothing in a run's files but rounding
GROWING = "growing"  # marks what adds to a run where it grows, and changes nothing of what is there


def limited(kind, words: str, holds: Callable):
    """The type of those values, of the type `kind`, for which holds(value) is true."""
    return Annotated[kind, Limits(lambda value, settings: value is None or holds(value), words)]


Kind = TypeVar("Kind")
Free = Annotated[Kind, FREE]
Growing = Annotated[Kind, GROWING]
Whole = limited(int, "must be at least 0", lambda n: n >= 0)
Count = limited(int, "must be at least 1", lambda n: n >= 1)
Rate = limited(float, "must be above 0", lambda x: x > 0)
Weight = limited(float, "must be at least 0", lambda x: x >= 0)
Share = limited(float, "must be at least 0 and below 1", lambda x: 0 <= x < 1)
# Logits are divided by it, and have to stay within float32.
Temperature = limited(float, "must be 0, which is greedy, or at least 0.001",
                      lambda x: x == 0 or x >= 0.001)
OldFile = limited(Optional[str], "is not there; give a file or folder that is",
                  lambda name: Path(name).exists())
# For real environments: the tiny model knows the words of the built-in ones alone.
REAL = Limits(lambda value, settings: not value or settings.model != "tiny",
              "is for a real language model; give another --model than tiny")
FINITE = Limits(lambda value, settings: not isinstance(value, float) or math.isfinite(value),
                "must be a finite number")


# -------------------------------------------------------------------------------- what is stated


class Stated:
    """What a class of settings may state beside its fields."""
    essential = ()  # the names of the settings that --help lists; --help all lists all
    # name -> values that replace defaults, if `preset_names` has the name; a model's, a protocol's,
    # or a method's, as "--method NAME".
    presets = {}

    @staticmethod
    def preset_names(values: dict) -> list[str]:
        """The presets for these values; a later one beats those before."""
        model = values["model"]
        protocol = values.get("protocol", "ours")
        names = ["", model, protocol, f"{model} {protocol}", f"--method {values['method']}"]
        return [*names, "quick", f"quick {model}"] if values.get("quick") else names

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        """(whether it is so, flags, what is wrong) of values; s: all settings of the run, those of
        its environment among them."""
        return []


class Method(NamedTuple):
    """What --method names."""
    loop: Callable    # loop(run)
    reads: tuple      # the settings that it reads: classes of them, or names
    about: str        # a line for --help
    beside: bool = False  # whether pi_ref stays beside the model while that is trained


@dataclass(frozen=True)
class Setting:
    """What a class states of one setting."""
    name: str
    kind: object    # its type, without marks
    marks: tuple    # Limits, FREE, GROWING
    default: object
    heading: str    # of its class
    comment: str

    @property
    def flag(self) -> str:
        return flag(self.name)


@cache
def settings_of(kind: type) -> dict[str, Setting]:
    """name -> the setting, of a class and of all that it extends."""
    plain = get_type_hints(kind)
    marked = get_type_hints(kind, include_extras=True)
    about = {}  # name -> heading and comment
    for part in reversed(kind.__mro__):
        if "__annotations__" in vars(part):
            for name, comment in comments_of(part).items():
                heading, _ = about.get(name, (heading_of(part), ""))  # of who stated it first
                about[name] = heading, comment

    stated = {}
    for f in fields(kind):
        marks = getattr(marked[f.name], "__metadata__", ())
        heading, comment = about.get(f.name, ("settings", ""))
        stated[f.name] = Setting(f.name, plain[f.name], marks, f.default, heading, comment)
    return stated


def heading_of(kind: type) -> str:
    """The first line of a class's docstring, without its full stop."""
    doc = inspect.getdoc(kind) or ""
    if not doc or doc.startswith(f"{kind.__name__}("):  # which a dataclass writes itself
        return f"{kind.__module__.split('.')[-1]}'s own settings"
    return doc.splitlines()[0].rstrip(".")


def comments_of(kind: type) -> dict[str, str]:
    """name -> the comment of a field in the source of its class: behind it, or else above it."""
    found = {}
    above = []  # lines of comments since the last line of code
    for line in inspect.getsource(kind).splitlines():
        code, _, comment = line.strip().partition("#")
        field = re.match(r"(\w+): ", code)
        if field:
            found[field[1]] = comment.strip() or " ".join(above)
        if code:
            above = []
        elif comment:
            above.append(comment.strip())
    return found


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def has_mark(kind: type, name: str, mark: str) -> bool:
    """Whether the type of a class's setting is marked FREE or GROWING."""
    return name in settings_of(kind) and mark in settings_of(kind)[name].marks


def names_in(reads: tuple) -> set[str]:
    """The names of settings in classes of them and single names, as `Method.reads` has them."""
    names = set()
    for part in reads:
        if isinstance(part, str):
            names.add(part)
        else:
            names |= set(settings_of(part))
    return names


# ---------------------------------------------------------------------------- the command line


def command_words(argv: list[str]) -> list[str]:
    """Returns the words of a command line with ~ expanded in values. Raises Refused if a value is
    empty, as that of an unset variable is, which would silently mean that nothing was given."""
    words = []
    for n, word in enumerate(argv):
        name, equals, value = "", "", word
        if word.startswith("--") or "=~" in word:
            name, equals, value = word.partition("=")
        if not value.strip() and (equals or not name):
            raise UsageError(f"{name or (argv[n - 1] if n else 'the first argument')}: the value is "
                          "empty; give one, or leave the flag out")
        words.append(name + equals + os.path.expanduser(value))
    return words


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UsageError(f"{message}; --help lists the settings")


def parse(
    argv: list[str],
    kind: type,
    methods: dict[str, Method],
    environment: Callable,
    program: str = "python coevolve.py",
):
    """Reads the settings of a run from a command line; with --help it prints them, and ends.

    Args:
        argv: The words of the command line.
        kind: The class of settings, which extends `Stated`.
        methods: What --method can name.
        environment: environment(name) -> the class of that environment's own settings.
        program: How --help says that the program is called.

    Returns:
        The settings, of the class `kind`, and the environment's own.

    Raises:
        Refused: Something is wrong; the text names all that is.
    """
    argv = command_words(argv)
    # The environment is read alone before all else, since it has settings of its own.
    of_env = Parser(add_help=False, allow_abbrev=False)
    of_env.add_argument("--env", default=kind.env)
    known, _ = of_env.parse_known_args(argv)
    options = environment(known.env)
    stated = settings_of(kind) | settings_of(options)

    parser, arguments = parser_of(stated, methods, program)
    given = vars(parser.parse_args(argv))
    help_on = given.pop("help", None)
    for name in given:
        if stated[name].kind is bool:
            given[name] = given[name] == "true"

    values, origins = values_of(given, kind, options)
    settings = kind(**{name: values[name] for name in settings_of(kind)})
    own = options(**{name: values[name] for name in settings_of(options)})

    reads = names_in((*methods[settings.method].reads, options))
    if help_on:
        shown = reads & {*kind.essential, *settings_of(options)} if help_on == "some" else reads
        for name, setting in stated.items():
            arguments[name].help = argparse.SUPPRESS
            if name in shown:
                arguments[name].help = help_of(setting, values[name], origins.get(name))
        parser.print_help()
        if len(shown) < len(reads):
            print(f"\n--help all lists {len(reads - shown)} more")
        sys.exit()
    wrong = faults(stated, given, reads, settings, own)
    if wrong:
        raise UsageError("; ".join(wrong))
    return settings, own


def values_of(given: dict, kind: type, options: type) -> tuple[dict, dict]:
    """name -> its value: the given one, else that of the last preset that has it, else the default;
    and name -> where the value is from, if it is no default."""
    stated = settings_of(kind) | settings_of(options)
    values = {name: setting.default for name, setting in stated.items()}
    env = given.get("env", kind.env)
    origins = {}
    for preset in kind.preset_names(values | given):
        replaced = kind.presets.get(preset, {}) | options.presets.get(preset, {})
        values |= replaced  # among them settings of programs that extend this one
        origins |= dict.fromkeys(replaced, f"preset {preset or env}")
    return values | given, origins | dict.fromkeys(given, "given")


def parser_of(stated: dict[str, Setting], methods: dict[str, Method], program: str):
    """A parser that returns what is given of these settings; and name -> the argument in it."""
    lines = [f"  {name:12} {method.about}" for name, method in methods.items()]
    parser = Parser(
        usage=f"{program} [--env ENV] [--method METHOD] [--model MODEL] [--SETTING VALUE ...]",
        description="\n".join(["methods:", *lines]), add_help=False, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS)
    parser.add_argument("-h", "--help", nargs="?", const="some", metavar="all",
                        choices=("some", "all"),
                        help="list the settings that matter most of those that --method reads in "
                             "--env, or all, and end")
    groups = {}
    arguments = {}
    for name, setting in stated.items():
        if setting.heading not in groups:
            groups[setting.heading] = parser.add_argument_group(setting.heading)
        takes = taken_by(setting)
        if name == "method":
            takes = dict(choices=tuple(methods))
        arguments[name] = groups[setting.heading].add_argument(setting.flag, **takes)
    return parser, arguments


def taken_by(setting: Setting) -> dict:
    """What argparse has to know of a setting's values."""
    if get_origin(setting.kind) is Literal:
        return dict(choices=get_args(setting.kind))
    if setting.kind is bool:
        return dict(type=str.lower, choices=("true", "false"), nargs="?", const="true")
    if setting.kind in (int, float):
        return dict(type=setting.kind, metavar="N" if setting.kind is int else "X")
    return dict(type=str, metavar="TEXT")


def help_of(setting: Setting, value, origin: str | None) -> str:
    """The comment of a setting, then its value and where that is from, such as
    "... 2.0 (preset tiny; default 0.1 [Section 4.3])"."""
    words, source = re.fullmatch(r"(.*?) *(\[[^][]*\])?", setting.comment).groups("")
    default = f"default {setting.default} {source}".strip()
    if setting.default is None:
        default = f"default: {source.strip('[]') or 'none'}"
    if value != setting.default or origin == "given":
        default = f"{value} ({origin}; {default})"
    return f"{words}: {default}".replace("%", "%%")  # which argparse would fill in


def faults(stated: dict[str, Setting], given: dict, reads: set[str], settings, own) -> list[str]:
    """What is wrong with settings: given but not read, out of their limits, in conflict."""
    found = []
    for name in given:
        if name not in reads:
            found.append(f"{flag(name)} is not read by --method {settings.method}")
    for name, value in (vars(settings) | vars(own)).items():
        limits = [mark for mark in stated[name].marks if isinstance(mark, Limits)]
        for limit in [FINITE, *limits]:
            if name in reads and not limit.holds(value, settings):
                found.append(f"{flag(name)} {value}: {limit.words}")
    everything = SimpleNamespace(**vars(settings), **vars(own))
    for so, flags, problem in settings.conflicts(everything) + own.conflicts(everything):
        if so:
            found.append(f"{flags}: {problem}")
    return found


# ------------------------------------------------------------------------ the settings of a run


def check_same(before: dict, now: dict, kind: type) -> None:
    """Raises Refused where a run that goes on was begun with other settings. Two programs may share
    a run's folder: what one of them does not know is not compared.

    Args:
        before: The settings in the run's folder.
        now: Those that it is to go on with.
        kind: Their class, which says what is free to change, and what may grow.
    """
    changed = []
    for name in before.keys() & now.keys():
        grows = has_mark(kind, name, GROWING) and now[name] > before[name]
        if before[name] != now[name] and not grows and not has_mark(kind, name, FREE):
            changed.append(f"{name} ({before[name]} -> {now[name]})")
    if changed:
        raise UsageError(f"--out: this folder was made with other settings: "
                      f"{', '.join(sorted(changed))}; give another, or these settings again")
