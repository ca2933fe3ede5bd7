"""Reads the settings and phases of a run, and handles the errors of commands that read runs.

A phase is identified by the keys of its record in phases.json, not by the name of its function, so
a fork may call its phases as it likes.
"""

import re
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from common.files import is_edited, read_json
from common.settings import UsageError, command_words, flag, settings_of
from engine.console import visible  # noqa: F401, which commands import from here
from environments import environment

SOLVED = 1 - 1e-9  # a reward of at least this is a success, as in dpo.Trajectory


def count(text: str) -> int:
    """Parses a positive integer on the command line."""
    if int(text) < 1:
        raise ArgumentTypeError("must be at least 1")
    return int(text)


def command(name: str, function: Callable) -> None:
    """Calls function(arguments of the command line). An error that the user can fix is printed in
    one line, and the exit status is 2."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the command without a traceback
    for stream in sys.stdout, sys.stderr:  # escape characters that the console's encoding lacks
        stream.reconfigure(errors="backslashreplace")
    try:
        function(command_words(sys.argv[1:]))
    except Exception as error:
        from engine.command import one_line, rank  # imports torch, which most commands do not need
        line = one_line(error)
        if line is None:
            raise
        if rank() == 0:
            print(f"{name}: {line}", file=sys.stderr)
        sys.exit(2)


def config_of(run: Path) -> dict:
    """Returns config.json of a run. Raises UsageError if the folder is not a run, such as the
    folder of an agent."""
    file = run / "config.json"
    config = read_json(file) if file.is_file() else {}
    if "settings" not in config:
        raise UsageError(f"{run}: not a run, it has no config.json with settings; name a folder "
                         "like runs/webshop-coevolve-s0")
    return config


def way_of(run: Path, env: str) -> list[str]:
    """Returns the flags with which an agent of a run plays as in its training. The list is empty if
    `env` is not the environment of the run."""
    settings = config_of(run)["settings"]
    if settings["env"] != env:
        return []
    names = ("view", "max_tokens", "max_new_tokens", *settings_of(environment(env)))
    return [f"{flag(name)}={settings[name]}" for name in names if settings.get(name) is not None]


def is_finished(run: Path) -> bool:
    return bool(config_of(run).get("finished")) or (run / "result.json").exists()


def phases_of(run: Path) -> dict[str, dict]:
    """Returns phases.json of a run: output -> record of its phase. Each record has the iteration
    `i`, the name `output`, and `edited` if the file is not the one that the phase wrote."""
    file = run / "phases.json"
    phases = read_json(file) if file.exists() else {}
    for output, row in phases.items():
        folder = re.match(r"iter(\d+)/", output)
        row.setdefault("i", int(folder[1]) if folder else 0)
        row["output"] = output
        row.pop("edited", None)
        if is_edited(run / output, row):
            row["edited"] = True
    return phases


def phases_with(phases: dict, *keys: str) -> list[dict]:
    """Returns the records that have all of these keys, in the order of their phases."""
    return [row for row in phases.values() if {*keys} <= row.keys()]


def explorations_in(phases: dict) -> list[dict]:
    """Returns the records of the agents' explorations. Explorations by the explorer of `evolve.py`
    do not count, because it is not an agent of the run."""
    rows = phases_with(phases, "name", "episodes", "reward", "success", "hard_negative")
    return [row for row in rows if "split" not in row and row["output"].endswith(".jsonl")]


def pairs_in(phases: dict) -> list[dict]:
    """Returns the records of the files of pairs."""
    return [row for row in phases_with(phases, "pairs", "trains")
            if isinstance(row["pairs"], dict)]


def agents_of(phases: dict) -> list[str]:
    """Returns the names of a run's agents, in the order in which they first appear."""
    return list(dict.fromkeys(row["name"] for row in phases_with(phases, "name")))
