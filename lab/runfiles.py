"""Reading a run: its settings and its phases; and what commands that read runs have in common.

A phase is found by what is recorded of it, not by the name of its function: a fork may call its
phases as it likes.
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

SOLVED = 1 - 1e-9  # a reward from here on is no failure, as in dpo.Trajectory


def count(text: str) -> int:
    """A number from 1 on, of a command line."""
    if int(text) < 1:
        raise ArgumentTypeError("must be at least 1")
    return int(text)


def command(name: str, work: Callable) -> None:
    """work(flags); a fault of the user's or of a file is one line, with exit status 2."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    for stream in sys.stdout, sys.stderr:  # a console may lack letters, and is no reason to end
        stream.reconfigure(errors="backslashreplace")
    try:
        work(command_words(sys.argv[1:]))
    except Exception as error:
        from engine.command import one_line, rank  # only here: most commands need no torch
        line = one_line(error)
        if line is None:
            raise
        if rank() == 0:
            print(f"{name}: {line}", file=sys.stderr)
        sys.exit(2)


def config_of(run: Path) -> dict:
    """config.json of a run; Refused if the folder is not one, as an agent's is none."""
    file = run / "config.json"
    config = read_json(file) if file.is_file() else {}
    if "settings" not in config:
        raise UsageError(f"{run}: not a run, it has no config.json with settings; name a folder like "
                      "runs/webshop-coevolve-s0")
    return config


def way_of(run: Path, env: str) -> list[str]:
    """The flags with which an agent of a run plays as it was trained to; none in another
    environment."""
    settings = config_of(run)["settings"]
    if settings["env"] != env:
        return []
    names = ("view", "max_tokens", "max_new_tokens", *settings_of(environment(env)))
    return [f"{flag(name)}={settings[name]}" for name in names if settings.get(name) is not None]


def is_finished(run: Path) -> bool:
    return bool(config_of(run).get("finished")) or (run / "result.json").exists()


def phases_of(run: Path) -> dict[str, dict]:
    """phases.json of a run: output -> what is recorded of it, with the iteration `i` of each, and
    `edited` if the file is not what the phase wrote."""
    file = run / "phases.json"
    rows = read_json(file) if file.exists() else {}
    for output, row in rows.items():
        found = re.match(r"iter(\d+)/", output)
        row.setdefault("i", int(found[1]) if found else 0)
        row["output"] = output
        row.pop("edited", None)
        if is_edited(run / output, row):
            row["edited"] = True
    return rows


def that_found(phases: dict, *names: str) -> list[dict]:
    """What is recorded of those phases that found all of this, in order."""
    return [row for row in phases.values() if {*names} <= row.keys()]


def explorations_in(phases: dict) -> list[dict]:
    """What is recorded of the agents' explorations; an explorer of `evolve.py` is no agent."""
    found = that_found(phases, "name", "episodes", "reward", "success", "hard_negative")
    return [row for row in found if "split" not in row and row["output"].endswith(".jsonl")]


def pairs_in(phases: dict) -> list[dict]:
    """What is recorded of the files of pairs."""
    return [row for row in that_found(phases, "pairs", "trains") if isinstance(row["pairs"], dict)]


def agents_of(phases: dict) -> list[str]:
    """The names of a run's agents, in the order in which it made them."""
    return list(dict.fromkeys(row["name"] for row in that_found(phases, "name")))
