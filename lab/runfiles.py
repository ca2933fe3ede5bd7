"""Reading a run: its settings and its phases; and what commands that read runs have in common."""

import re
import signal
import sys
from argparse import ArgumentTypeError
from pathlib import Path

from common.files import read_json
from common.settings import Refused
from worlds import EnvError, World, without_passwords


def count(text: str) -> int:
    """A number from 1 on, of a command line."""
    if int(text) < 1:
        raise ArgumentTypeError("must be at least 1")
    return int(text)


def command(name: str, work) -> None:
    """work(flags); a fault of the user's or of a file is one line, with exit status 2."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    try:
        work(sys.argv[1:])
    except (ValueError, EnvError, OSError, FloatingPointError) as error:
        if not is_told(error):
            raise
        print(f"{name}: {without_passwords(' '.join(str(error).split()))}", file=sys.stderr)
        sys.exit(2)


def is_told(error: Exception) -> bool:
    """Whether an error is the user's or a file's, and no bug; of a ValueError its kind says it."""
    if not isinstance(error, ValueError) or isinstance(error, Refused):
        return True
    from dpo import Unusable  # only here: what reads no model starts without torch
    return isinstance(error, Unusable)


def visible(text: str) -> str:
    """`text` with control characters and others that a terminal may obey escaped, by number."""
    return "".join(c if c.isprintable() or c == "\n" else " " if c == "\t" else f"<{ord(c):02X}>"
                   for c in text.replace("\r\n", "\n"))


def config_of(run: Path) -> dict:
    """config.json of a run; Refused if the folder is not one, as an agent's is none."""
    file = run / "config.json"
    config = read_json(file) if file.is_file() else {}
    if "settings" not in config:
        raise Refused(f"{run}: not a run, it has no config.json with settings; name a folder like "
                      "runs/webshop-coevolve-s0")
    return config


def success_of(run: Path) -> float:
    """The reward from which on an episode of a run is solved, as its environment has it."""
    return config_of(run).get("success", World.success)


def phases_of(run: Path) -> dict[str, dict]:
    """phases.json of a run, output -> what is recorded of it, with the iteration `i` of each."""
    path = run / "phases.json"
    rows = read_json(path) if path.exists() else {}
    for output, row in rows.items():
        found = re.match(r"iter(\d+)/", output)
        row.setdefault("i", int(found[1]) if found else 0)
    return rows


def kept_of(run: Path) -> dict[str, dict]:
    """`phases_of` of what is there. A folder that was copied has the records of all that its base
    made. An agent of a run that has finished counts, though its folder may have been deleted."""
    finished = (run / "result.json").exists()
    found = {}
    for output, row in phases_of(run).items():
        is_agent = not output.endswith(".jsonl")
        if (run / output).exists() or finished and is_agent:
            found[output] = row
    return found


def of(phases: dict, work: str) -> list[dict]:
    """What is recorded of the phases of one kind, by the name of its function."""
    return [dict(row, output=output) for output, row in phases.items() if row.get("work") == work]


def explorations(phases: dict) -> list[dict]:
    """What is recorded of the agents' explorations; an explorer of `evolve.py` is no agent."""
    return [row for row in of(phases, "explore") if "name" in row and row["episodes"]]


def agents_of(phases: dict) -> list[str]:
    """The names of a run's agents, in the order in which it made them."""
    return list(dict.fromkeys(row["name"] for row in phases.values() if "name" in row))


def kinds_of(phases: dict) -> list[str]:
    """The kinds of pairs in a run, those with an expert first."""
    return sorted({kind for row in of(phases, "make_pairs") for kind in row["pairs"]})
