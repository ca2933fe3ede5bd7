"""Reads the settings and phases of a run, for commands such as `run.sh page` and `run.sh compare`,
and prints the errors of these commands.

The kind of a phase is recognised by the keys in its phases.json record, not by the name of its
function. Modified copies of coevolve.py can therefore rename their phases.
"""

import re
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from common.files import is_edited, read_json, read_jsonl
from common.settings import UsageError, command_words, flag, settings_of
from engine.console import visible  # noqa: F401, re-exported for the commands
from environments import environment

SOLVED = 1 - 1e-9  # minimum reward of a success, the same as in dpo.Trajectory


def count(text: str) -> int:
    if int(text) < 1:
        raise ArgumentTypeError("must be at least 1")
    return int(text)


def command(name: str, function: Callable) -> None:
    """Calls `function` with the list of command-line arguments. An error that the user can fix is
    printed as one line after the command's name, and the exit status is 2."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no traceback if the output is piped to `head`
    for stream in sys.stdout, sys.stderr:  # escape characters that the terminal's encoding lacks
        stream.reconfigure(errors="backslashreplace")
    try:
        function(command_words(sys.argv[1:]))
    except Exception as error:
        # Imported here because engine.command imports torch, which most commands do not need.
        from engine.command import one_line, rank
        line = one_line(error)
        if line is None:
            raise
        if rank() == 0:
            print(f"{name}: {line}", file=sys.stderr)
        sys.exit(2)


def config_of(run: Path) -> dict:
    """Returns the content of a run's config.json. Raises UsageError if the folder is not a run."""
    file = run / "config.json"
    config = read_json(file) if file.is_file() else {}
    if "settings" not in config:
        raise UsageError(f"{run}: not a run, it has no config.json with settings; name a folder "
                         "like runs/webshop-coevolve-s0")
    return config


def way_of(run: Path, env: str) -> list[str]:
    """Returns the command-line flags that make an agent play with the view, the token limits and
    the environment settings of the run that trained it, or [] if `env` is a different environment.
    """
    settings = config_of(run)["settings"]
    if settings["env"] != env:
        return []
    names = ("view", "max_tokens", "max_new_tokens", *settings_of(environment(env)))
    return [f"{flag(name)}={settings[name]}" for name in names if settings.get(name) is not None]


def is_finished(run: Path) -> bool:
    return bool(config_of(run).get("finished")) or (run / "result.json").exists()


def rows_in(file: Path) -> list[dict]:
    """Returns the rows of a JSON lines file, or [] if the user has deleted it."""
    return read_jsonl(file) if file.is_file() else []


def phases_of(run: Path) -> dict[str, dict]:
    """Reads the phases.json of a run. Returns {name of the output: record} for all finished phases.

    Three keys are added to each record: `i` is the iteration, `output` is the name of the output,
    and `edited` is True if somebody has changed the output after the phase wrote it.
    """
    file = run / "phases.json"
    phases = read_json(file) if file.exists() else {}
    for output, row in phases.items():
        folder = re.match(r"iter(\d+)/", output)
        row.setdefault("i", int(folder[1]) if folder else 0)
        row["output"] = output
        row.pop("edited", None)
        if "hash" in row and is_edited(run / output, row):
            row["edited"] = True
    return phases


def phases_with(phases: dict, *keys: str) -> list[dict]:
    """Returns the records that contain all of these keys, in the order in which the phases ran."""
    return [row for row in phases.values() if {*keys} <= row.keys()]


def explorations_in(phases: dict) -> list[dict]:
    """Returns the records of the phases in which the run's agents explored. Phases of the explorer
    in `evolve.py` are not included, because the explorer is not an agent of the run."""
    rows = phases_with(phases, "name", "episodes", "reward", "success", "hard_negative")
    return [row for row in rows if "split" not in row and row["output"].endswith(".jsonl")]


def evaluations_in(phases: dict) -> list[dict]:
    """Returns the records of the phases that evaluated an agent on a split."""
    return phases_with(phases, "split", "name", "episodes", "reward", "success")


def target_of(phases: dict) -> str:
    """Returns the name of a run's target agent: "target", or the agent that the run evaluates
    first, if a modified copy of coevolve.py has renamed its agents."""
    names = [row["name"] for row in evaluations_in(phases)]
    return names[0] if names and "target" not in names else "target"


def agents_of(phases: dict) -> list[str]:
    """Returns the names of a run's agents, in the order of their first phases."""
    return list(dict.fromkeys(row["name"] for row in phases_with(phases, "name")))
