"""Settings of a run: declaration, command-line parsing, validation, and the --help text.

A setting is a field of a frozen dataclass. Its --help text is the comment above the field or at the
end of the field's line. The comment ends with the source of the default value in brackets, such as
[App. B]. The field's type restricts the allowed values. The type is a plain type such as int, a
Literal, Optional[str], or one of the types defined below, such as Rate.

    # Beta of Eq. (7) in iteration 1 [App. B; ETO]
    beta: Rate = 0.1

In --help, the settings of a class are listed under a heading, the first line of the class's
docstring.
"""

import argparse
import inspect
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
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
    """An error in the user's input, such as an invalid setting or a missing file.

    The message is a single line with the name of the setting or the file, the value, and a remedy.
    """


# ------------------------------------------------------------------------------- types of values


@dataclass(frozen=True)
class Limits:
    """A condition on the value of a setting. The condition is part of the setting's type."""
    holds: Callable  # holds(value, settings) is True if a value is valid with these settings
    message: str     # error message, printed after the invalid value


@dataclass(frozen=True)
class Follows:
    """Marks a setting that gets the value of the setting `name`, if only the latter is given."""
    name: str


# A Free setting changes the results of a run only through rounding errors, for example
# --tokens-per-forward.
FREE = "free"
# A Growing setting can be increased to extend a run, for example --iterations.
GROWING = "growing"


def limited(kind, message: str, holds: Callable):
    """Returns the type of a setting whose values satisfy `holds`. None is always allowed."""
    return Annotated[kind, Limits(lambda value, settings: value is None or holds(value), message)]


def following(kind, name: str):
    """Returns the type of a setting that follows the setting `name` (see `Follows`)."""
    return Annotated[kind, Follows(name)]


Kind = TypeVar("Kind")
Free = Annotated[Kind, FREE]
Growing = Annotated[Kind, GROWING]
Whole = limited(int, "must be at least 0", lambda n: n >= 0)
Count = limited(int, "must be at least 1", lambda n: n >= 1)
Rate = limited(float, "must be above 0", lambda x: x > 0)
Weight = limited(float, "must be at least 0", lambda x: x >= 0)
Share = limited(float, "must be at least 0 and below 1", lambda x: 0 <= x < 1)
# The minimum of 0.001 prevents an overflow of the logits, which are divided by the temperature.
Temperature = limited(float, "must be 0 (greedy decoding) or at least 0.001",
                      lambda x: x == 0 or x >= 0.001)
# A pipe, as in --experts <(zcat FILE), is refused, because a resumed run could not read it again.
OldFile = limited(Optional[str], "does not exist, or is a pipe; give an existing file or folder",
                  lambda name: Path(name).is_file() or Path(name).is_dir())
# A condition on settings that select a real environment, such as a WebShop server. The vocabulary
# of the model "tiny" contains only the words of the built-in environments.
REAL = Limits(lambda value, settings: not value or settings.model != "tiny",
              "needs a real language model; give another --model than tiny")
FINITE = Limits(lambda value, settings: not isinstance(value, float) or math.isfinite(value),
                "must be a finite number")


# --------------------------------------------------------------------------------- declarations


class Stated:
    """Base class of settings. A subclass may define presets and conflicts between settings."""
    essential = ()  # names of the most important settings; --help without "all" lists only these
    # Presets replace default values: {name of the preset: {setting name: value}}. `preset_names`
    # returns the names of the presets that apply to a run.
    presets = {}

    @staticmethod
    def preset_names(values: dict) -> list[str]:
        """Returns the names of the presets that apply to a run, sorted by increasing priority."""
        model = values["model"]
        protocol = f"--protocol {values.get('protocol', 'ours')}"
        names = ["", model, protocol, f"{model} {protocol}", f"--method {values['method']}"]
        return [*names, "quick", f"quick {model}"] if values.get("quick") else names

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        """Checks for settings that cannot be combined.

        Args:
            s: All settings of the run, including the settings of its environment.

        Returns:
            A list of tuples (is_conflict, flags, message), one for each check.
        """
        return []


class Method(NamedTuple):
    """A training method, which --method selects by name."""
    loop: Callable    # loop(run) runs the whole method
    reads: tuple      # the settings that the method uses: names, or classes with all their settings
    about: str        # description for --help
    beside: bool = False  # True if the reference model pi_ref is in GPU memory during training


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting, read from a field of a settings class."""
    name: str
    kind: object    # the type without the metadata of Annotated, for example float for Rate
    marks: tuple    # the metadata in Annotated: Limits, Follows, and the markers FREE and GROWING
    default: object
    heading: str    # the --help heading under which the setting is listed
    comment: str    # the --help text

    @property
    def follows(self) -> str | None:
        """The name of the setting that this setting follows, or None."""
        return next((mark.name for mark in self.marks if isinstance(mark, Follows)), None)

    def has_followed(self, values: dict) -> bool:
        """Returns True if the setting has the same value as the one that it follows."""
        return self.follows is not None and values.get(self.name) == values.get(self.follows)


@cache
def settings_of(kind: type) -> dict[str, Setting]:
    """Returns the declarations of all settings of a class, including inherited ones, by name.

    Raises UsageError if a class attribute has a value but no type, because a dataclass would ignore
    it.
    """
    for base in filter(is_dataclass, kind.__mro__):
        for name, value in vars(base).items():
            is_value = isinstance(value, bool | int | float | str | None)
            typed = vars(base).get("__annotations__", {})
            if is_value and name[0] != "_" and name not in typed:
                raise UsageError(f"{base.__name__}.{name} = {value!r} has no type, so it would not "
                                 f"be a setting; write {name}: {type(value).__name__} = {value!r}")
    plain_types = get_type_hints(kind)
    annotated_types = get_type_hints(kind, include_extras=True)
    descriptions = {}  # the tuple (heading, comment) of each setting, by setting name
    for base in reversed(kind.__mro__):
        if "__annotations__" in vars(base):
            for name, comment in comments_of(base).items():
                # A setting that a subclass overrides stays under the heading of the base class.
                heading, _ = descriptions.get(name, (heading_of(base), ""))
                descriptions[name] = heading, comment

    settings = {}
    for f in fields(kind):
        marks = getattr(annotated_types[f.name], "__metadata__", ())
        heading, comment = descriptions.get(f.name, ("settings", ""))
        settings[f.name] = Setting(f.name, plain_types[f.name], marks, f.default, heading, comment)
    return settings


def heading_of(kind: type) -> str:
    """Returns the --help heading of a settings class, the first line of its docstring."""
    doc = inspect.getdoc(kind) or ""
    # If a dataclass has no docstring, Python generates one, such as "Settings(beta: float = 0.1)".
    if not doc or doc.startswith(f"{kind.__name__}("):
        return f"{kind.__module__.split('.')[-1]}'s own settings"
    return doc.splitlines()[0].rstrip(".")


def comments_of(kind: type) -> dict[str, str]:
    """Reads the comments on the fields of a class from its source code.

    Returns a dict {field name: comment}, with the comment at the end of the field's line, or else
    the lines of comments directly above the field.
    """
    comments = {}
    above = []  # the comment lines since the last line of code
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


def names_in(reads: tuple) -> set[str]:
    """Returns the names of all settings in `reads`, a tuple in the format of `Method.reads`."""
    names = set()
    for entry in reads:
        if isinstance(entry, str):
            names.add(entry)
        else:
            names |= set(settings_of(entry))
    return names


# ---------------------------------------------------------------------------- the command line


def command_words(argv: list[str]) -> list[str]:
    """Returns the command-line arguments, with ~ in values replaced with the home directory.

    Raises UsageError if a value is empty, because the flag would be ignored without a warning. The
    usual cause is an unset shell variable, for example in --model "$MODEL".
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
    inherit: Callable = lambda branch: {},
):
    """Parses and checks the settings of a run, or prints the help text and exits with --help.

    Args:
        kind: The settings class of the program, a subclass of `Stated`.
        methods: The training methods that --method can select, by name.
        environment: A function that takes the name of an environment and returns the settings class
            of this environment.
        program: The command that starts the program, for the usage line of --help.
        inherit: A function that takes the value of --branch, and returns the settings of that run.

    Returns:
        The settings of the program (of class `kind`), and the settings of the environment.

    Raises:
        UsageError: Some settings are invalid. The message lists all of them.
    """
    # 1. Parse --env first, because the environment determines which other flags are valid.
    argv = command_words(argv)
    first_parser = Parser(add_help=False, allow_abbrev=False)
    first_parser.add_argument("--env")
    first_parser.add_argument("--branch")
    first, _ = first_parser.parse_known_args(argv)
    inherited = inherit(first.branch) if first.branch else {}
    options = environment(first.env or inherited.get("env", kind.env))
    declared = settings_of(kind) | settings_of(options)

    # 2. Parse all settings, and fill in presets and defaults.
    parser, arguments = parser_of(declared, methods, program)
    given = vars(parser.parse_args(argv))
    help_on = given.pop("help", None)
    for name in given:
        if declared[name].kind is bool:
            given[name] = given[name] == "true"

    values, origins = values_of(given, inherited, kind, options)
    settings = kind(**{name: values[name] for name in settings_of(kind)})
    env_settings = options(**{name: values[name] for name in settings_of(options)})

    # 3. Print --help, or check the values.
    if settings.method not in methods:  # it comes from the run of --branch
        raise UsageError(f"--method {settings.method}: this program does not have it; choose from: "
                         f"{', '.join(methods)}")
    reads = names_in((*methods[settings.method].reads, options))
    if help_on:
        shown = reads
        if help_on == "some":
            shown = reads & {*kind.essential, *settings_of(options)}
            shown |= {name for name in reads if declared[name].follows in shown}
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


def values_of(given: dict, inherited: dict, kind: type, options: type) -> tuple[dict, dict]:
    """Determines the values of all settings.

    The sources, from the lowest to the highest priority, are the defaults, the presets, the
    inherited values, and the command line. The preset of a method that was not inherited has
    priority over inherited values. If setting B follows setting A, a source that sets only A also
    sets B to the same value.

    Args:
        given: The values from the command line, by setting name.
        inherited: The values of the run that --branch names. Free settings are not inherited.

    Returns:
        Two dicts: the value of each setting, and the origin of each value that is not the default:
        "given", "--branch", or the name of a preset, such as "preset tiny".
    """
    declared = settings_of(kind) | settings_of(options)
    values = {name: setting.default for name, setting in declared.items()}
    inherited = {name: value for name, value in inherited.items()
                 if name in declared and FREE not in declared[name].marks}
    of_run = values | inherited | given
    sources = []
    for preset in kind.preset_names(of_run):
        sources.append((f"preset {preset or of_run['env']}",
                        kind.presets.get(preset, {}) | options.presets.get(preset, {})))
    sources.append(("--branch", inherited))
    if inherited and inherited.get("method") != of_run["method"]:
        preset = f"--method {of_run['method']}"
        sources.append((f"preset {preset}", kind.presets.get(preset, {})))
    sources.append(("given", given))

    origins = {}
    for origin, source in sources:
        followers = {name: source[setting.follows] for name, setting in declared.items()
                     if setting.follows in source and name not in source}
        # A preset may contain settings that only a different program declares.
        values |= followers | source
        origins |= dict.fromkeys(followers | source, origin)
    return values, origins


def parser_of(declared: dict[str, Setting], methods: dict[str, Method], program: str):
    """Creates the command-line parser for the given settings.

    The parser returns only the settings that were given on the command line, without defaults.
    Returns the parser and a dict {setting name: argparse action}, for the help texts.
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
        arguments[name] = groups[setting.heading].add_argument(flag(name), **keywords)
    return parser, arguments


def argparse_keywords(setting: Setting) -> dict:
    if get_origin(setting.kind) is Literal:
        return dict(choices=get_args(setting.kind))
    if setting.kind is bool:
        return dict(type=str.lower, choices=("true", "false"), nargs="?", const="true")
    if setting.kind in (int, float):
        return dict(type=setting.kind, metavar="N" if setting.kind is int else "X")
    return dict(type=str, metavar="TEXT")


def help_of(setting: Setting, value, origin: str | None) -> str:
    """Returns the --help text of a setting: its comment, its value, and the origin of the value.

    For example: "Beta of Eq. (7): 2.0 (preset tiny; default 0.1 [Section 4.3])". The origin is None
    if the value is the default.
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
    """Checks the settings, and returns a list of error messages.

    There is a message for each given setting that the selected method does not use, for each value
    that violates a limit, and for each conflict between settings.

    Args:
        given: The values from the command line, by setting name.
        reads: The names of the settings that the method and the environment use.
    """
    problems = []
    values = vars(settings) | vars(env_settings)
    for name in given:
        if name not in reads:
            problems.append(f"{flag(name)} is not read by --method {settings.method}")
    for name, value in values.items():
        if declared[name].has_followed(values):
            continue  # report an invalid value only for the setting that is followed
        limits = [mark for mark in declared[name].marks if isinstance(mark, Limits)]
        for limit in [FINITE, *limits]:
            if name in reads and not limit.holds(value, settings):
                problems.append(f"{flag(name)} {value}: {limit.message}")
        # argparse has checked only the values from the command line.
        choices = get_args(declared[name].kind)
        is_choice = get_origin(declared[name].kind) is Literal
        if name in reads and is_choice and value not in choices:
            problems.append(f"{flag(name)} {value}: choose from: {', '.join(choices)}")
    all_settings = SimpleNamespace(**values)
    conflicts = settings.conflicts(all_settings) + env_settings.conflicts(all_settings)
    for is_conflict, flags, message in conflicts:
        if is_conflict:
            problems.append(f"{flags}: {message}")
    return problems


# ------------------------------------------------------------------------ the settings of a run


def check_same(before: dict, now: dict, declared: dict[str, Setting]) -> None:
    """Raises UsageError if a run is resumed with settings that are different from before.

    Free settings may change, and Growing settings may increase. A setting that is missing in
    `before`, because the program did not have it, had its default. A setting that is missing in
    `now` is ignored.
    """
    changed = []
    for name, value in now.items():
        old = before.get(name, declared[name].default)
        marks = declared[name].marks
        if value != old and FREE not in marks and not (GROWING in marks and value > old):
            changed.append(f"{name} ({old} -> {value})")
    if changed:
        raise UsageError(f"--out: the run in this folder has other settings: "
                         f"{', '.join(sorted(changed))}; give another folder, or the same settings")
