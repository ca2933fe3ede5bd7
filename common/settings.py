"""Settings: declares them, parses them from a command line, checks them, and prints --help.

A setting is a field of a frozen dataclass. The comment above the field or behind it is its --help
text, and ends with the source of the default in brackets. The type limits the values. It is a plain
type, a Literal, Optional[str], or one of the types below.

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
    """An input from the user that cannot be used.

    The message is one line, which names the object, its value and a remedy.
    """


# ------------------------------------------------------------------------------- types of values


@dataclass(frozen=True)
class Limits:
    """A condition on the values of a setting, beyond its type."""
    holds: Callable  # holds(value, settings) -> bool, with all settings of the run
    message: str     # printed after a value for which the condition is false


FREE = "free"  # marks a setting that affects only the rounding of a run's results
GROWING = "growing"  # marks a setting that, if increased, only adds outputs to a run


def limited(kind, message: str, holds: Callable):
    """Returns the type of a setting whose values are of type `kind` and satisfy holds(value)."""
    return Annotated[kind, Limits(lambda value, settings: value is None or holds(value), message)]


Kind = TypeVar("Kind")
Free = Annotated[Kind, FREE]
Growing = Annotated[Kind, GROWING]
Whole = limited(int, "must be at least 0", lambda n: n >= 0)
Count = limited(int, "must be at least 1", lambda n: n >= 1)
Rate = limited(float, "must be above 0", lambda x: x > 0)
Weight = limited(float, "must be at least 0", lambda x: x >= 0)
Share = limited(float, "must be at least 0 and below 1", lambda x: 0 <= x < 1)
# Logits are divided by the temperature, and the quotients must stay within the range of float32.
Temperature = limited(float, "must be 0 (greedy decoding) or at least 0.001",
                      lambda x: x == 0 or x >= 0.001)
OldFile = limited(Optional[str], "does not exist; give an existing file or folder",
                  lambda name: Path(name).exists())
# Condition on settings of real environments. The vocabulary of the tiny model covers only the
# built-in environments.
REAL = Limits(lambda value, settings: not value or settings.model != "tiny",
              "needs a real language model; give another --model than tiny")
FINITE = Limits(lambda value, settings: not isinstance(value, float) or math.isfinite(value),
                "must be a finite number")


# --------------------------------------------------------------------------------- declarations


class Stated:
    """Base class of settings, which also declares presets, conflicts and the content of --help."""
    essential = ()  # names of the settings that --help lists; --help all lists all of them
    # Preset name -> setting name -> value that replaces the default. A preset is named after a
    # model, a protocol or a method ("--method NAME"), and applies if `preset_names` returns it.
    presets = {}

    @staticmethod
    def preset_names(values: dict) -> list[str]:
        """Returns the names of the presets that apply to these values, by increasing priority."""
        model = values["model"]
        protocol = values.get("protocol", "ours")
        names = ["", model, protocol, f"{model} {protocol}", f"--method {values['method']}"]
        return [*names, "quick", f"quick {model}"] if values.get("quick") else names

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        """Returns possible conflicts between settings, as (is a conflict, flags, message).

        Args:
            s: All settings of the run, including those of its environment.
        """
        return []


class Method(NamedTuple):
    """A training method."""
    loop: Callable    # loop(run) runs the method
    reads: tuple      # the settings that the method reads, as classes or names
    about: str        # description for --help
    beside: bool = False  # True if pi_ref, the reference model, stays in memory during training
    # A function settings -> the number of trajectories in a task's largest group
    group: Callable = lambda s: 1


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting."""
    name: str
    kind: object    # type, without marks
    marks: tuple    # Limits objects, FREE or GROWING
    default: object
    heading: str    # heading of its class in --help
    comment: str

    @property
    def flag(self) -> str:
        return flag(self.name)


@cache
def settings_of(kind: type) -> dict[str, Setting]:
    """Returns the settings of a class and of its base classes, by name."""
    plain_types = get_type_hints(kind)
    annotated_types = get_type_hints(kind, include_extras=True)
    descriptions = {}  # name -> heading and comment
    for base in reversed(kind.__mro__):
        if "__annotations__" in vars(base):
            for name, comment in comments_of(base).items():
                # The heading is that of the first class that declares the setting.
                heading, _ = descriptions.get(name, (heading_of(base), ""))
                descriptions[name] = heading, comment

    settings = {}
    for f in fields(kind):
        marks = getattr(annotated_types[f.name], "__metadata__", ())
        heading, comment = descriptions.get(f.name, ("settings", ""))
        settings[f.name] = Setting(f.name, plain_types[f.name], marks, f.default, heading, comment)
    return settings


def heading_of(kind: type) -> str:
    """Returns the first line of a class's docstring, without its full stop."""
    doc = inspect.getdoc(kind) or ""
    if not doc or doc.startswith(f"{kind.__name__}("):  # the default docstring of a dataclass
        return f"{kind.__module__.split('.')[-1]}'s own settings"
    return doc.splitlines()[0].rstrip(".")


def comments_of(kind: type) -> dict[str, str]:
    """Returns the comments of a class's fields by name, taken from its source.

    A field's comment is at the end of its line, or else in the lines above it.
    """
    comments = {}
    above = []  # comment lines since the last line of code
    for line in inspect.getsource(kind).splitlines():
        code, _, comment = line.strip().partition("#")
        field = re.match(r"(\w+): ", code)
        if field:
            comments[field[1]] = comment.strip() or " ".join(above)
        if code:
            above = []
        elif comment:
            above.append(comment.strip())
    return comments


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def has_mark(kind: type, name: str, mark: str) -> bool:
    """Returns True if a class has a setting of this name with the given mark."""
    return name in settings_of(kind) and mark in settings_of(kind)[name].marks


def names_in(reads: tuple) -> set[str]:
    """Returns the names of all settings in `Method.reads`, which holds classes and single names."""
    names = set()
    for entry in reads:
        if isinstance(entry, str):
            names.add(entry)
        else:
            names |= set(settings_of(entry))
    return names


# ---------------------------------------------------------------------------- the command line


def command_words(argv: list[str]) -> list[str]:
    """Returns the command-line arguments, with ~ expanded in values.

    Raises UsageError if a value is empty, for example because a shell variable is unset. An empty
    value would otherwise have the same effect as none, without a message.
    """
    words = []
    for n, word in enumerate(argv):
        name, equals, value = "", "", word
        if word.startswith("--") or "=~" in word:
            name, equals, value = word.partition("=")
        if not value.strip() and (equals or not name):
            raise UsageError(f"{name or (argv[n - 1] if n else 'the first argument')}: the value "
                             "is empty; give one, or leave the flag out")
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
    """Parses the settings of a run from a command line. With --help, prints them and exits.

    Args:
        argv: The command-line arguments.
        kind: The class of the settings, which extends `Stated`.
        methods: The methods that --method can select, by name.
        environment: environment(name) returns the class of an environment's own settings.
        program: Name of the program in --help.

    Returns:
        The settings, an object of the class `kind`, and the environment's own settings.

    Raises:
        UsageError: Settings are wrong. The message lists all of them.
    """
    # 1. Parse --env first, because each environment has settings of its own.
    argv = command_words(argv)
    env_parser = Parser(add_help=False, allow_abbrev=False)
    env_parser.add_argument("--env", default=kind.env)
    env_arguments, _ = env_parser.parse_known_args(argv)
    options = environment(env_arguments.env)
    declared = settings_of(kind) | settings_of(options)

    # 2. Parse all settings, and fill in presets and defaults.
    parser, arguments = parser_of(declared, methods, program)
    given = vars(parser.parse_args(argv))
    help_on = given.pop("help", None)
    for name in given:
        if declared[name].kind is bool:
            given[name] = given[name] == "true"

    values, origins = values_of(given, kind, options)
    settings = kind(**{name: values[name] for name in settings_of(kind)})
    env_settings = options(**{name: values[name] for name in settings_of(options)})

    # 3. Print --help, or check the values.
    reads = names_in((*methods[settings.method].reads, options))
    if help_on:
        shown = reads & {*kind.essential, *settings_of(options)} if help_on == "some" else reads
        for name, setting in declared.items():
            arguments[name].help = argparse.SUPPRESS
            if name in shown:
                arguments[name].help = help_of(setting, values[name], origins.get(name))
        parser.print_help()
        if len(shown) < len(reads):
            print(f"\n--help all lists {len(reads - shown)} more")
        sys.exit()
    problems = problems_in(declared, given, reads, settings, env_settings)
    if problems:
        raise UsageError("; ".join(problems))
    return settings, env_settings


def values_of(given: dict, kind: type, options: type) -> tuple[dict, dict]:
    """Returns the value of each setting, and the origin of each value that is no default.

    A value on the command line has priority over presets, a later preset over an earlier one, and
    presets over the default.
    """
    declared = settings_of(kind) | settings_of(options)
    values = {name: setting.default for name, setting in declared.items()}
    env = given.get("env", kind.env)
    origins = {}
    for preset in kind.preset_names(values | given):
        replaced = kind.presets.get(preset, {}) | options.presets.get(preset, {})
        values |= replaced  # includes settings of programs that extend this one
        origins |= dict.fromkeys(replaced, f"preset {preset or env}")
    return values | given, origins | dict.fromkeys(given, "given")


def parser_of(declared: dict[str, Setting], methods: dict[str, Method], program: str):
    """Returns a parser for these settings, and its arguments by name.

    The parser returns only the settings that are given.
    """
    lines = [f"  {name:12} {method.about}" for name, method in methods.items()]
    parser = Parser(
        usage=f"{program} [--env ENV] [--method METHOD] [--model MODEL] [--SETTING VALUE ...]",
        description="\n".join(["methods:", *lines]), add_help=False, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS)
    parser.add_argument("-h", "--help", nargs="?", const="some", metavar="all",
                        choices=("some", "all"),
                        help="print the most important settings that --method reads in --env, "
                             "or all of them, and exit")
    groups = {}
    arguments = {}
    for name, setting in declared.items():
        if setting.heading not in groups:
            groups[setting.heading] = parser.add_argument_group(setting.heading)
        keywords = argparse_keywords(setting)
        if name == "method":
            keywords = dict(choices=tuple(methods))
        arguments[name] = groups[setting.heading].add_argument(setting.flag, **keywords)
    return parser, arguments


def argparse_keywords(setting: Setting) -> dict:
    """Returns the keyword arguments of add_argument that describe a setting's values."""
    if get_origin(setting.kind) is Literal:
        return dict(choices=get_args(setting.kind))
    if setting.kind is bool:
        return dict(type=str.lower, choices=("true", "false"), nargs="?", const="true")
    if setting.kind in (int, float):
        return dict(type=setting.kind, metavar="N" if setting.kind is int else "X")
    return dict(type=str, metavar="TEXT")


def help_of(setting: Setting, value, origin: str | None) -> str:
    """Returns a setting's --help text: its comment, then its value and the origin of the value.

    For example: "... 2.0 (preset tiny; default 0.1 [Section 4.3])".
    """
    text, source = re.fullmatch(r"(.*?) *(\[[^][]*\])?", setting.comment).groups("")
    default = f"default {setting.default} {source}".strip()
    if setting.default is None:
        default = f"default: {source.strip('[]') or 'none'}"
    if value != setting.default or origin == "given":
        default = f"{value} ({origin}; {default})"
    return f"{text}: {default}".replace("%", "%%")  # argparse formats help texts with %


def problems_in(declared: dict[str, Setting], given: dict, reads: set[str], settings,
                env_settings) -> list[str]:
    """Returns messages about settings that the method does not read, limits and conflicts."""
    problems = []
    for name in given:
        if name not in reads:
            problems.append(f"{flag(name)} is not read by --method {settings.method}")
    for name, value in (vars(settings) | vars(env_settings)).items():
        limits = [mark for mark in declared[name].marks if isinstance(mark, Limits)]
        for limit in [FINITE, *limits]:
            if name in reads and not limit.holds(value, settings):
                problems.append(f"{flag(name)} {value}: {limit.message}")
    all_settings = SimpleNamespace(**vars(settings), **vars(env_settings))
    conflicts = settings.conflicts(all_settings) + env_settings.conflicts(all_settings)
    for is_conflict, flags, message in conflicts:
        if is_conflict:
            problems.append(f"{flags}: {message}")
    return problems


# ------------------------------------------------------------------------ the settings of a run


def check_same(before: dict, now: dict, kind: type) -> None:
    """Raises UsageError if a run is resumed with other settings than it was started with.

    Free settings may change, and Growing settings may increase. Two programs may share a run's
    folder, so a setting that one of them does not have is not compared.

    Args:
        before: The settings in the run's folder.
        now: The settings to resume with.
        kind: The class of the settings.
    """
    changed = []
    for name in before.keys() & now.keys():
        grows = has_mark(kind, name, GROWING) and now[name] > before[name]
        if before[name] != now[name] and not grows and not has_mark(kind, name, FREE):
            changed.append(f"{name} ({before[name]} -> {now[name]})")
    if changed:
        raise UsageError(f"--out: the run in this folder has other settings: "
                         f"{', '.join(sorted(changed))}; give another folder, or the same settings")
