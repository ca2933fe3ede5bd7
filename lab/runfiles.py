"""Reading a run: its settings, its phases, and its files, whole or still growing."""

import json
import re
import signal
import sys
import textwrap
from pathlib import Path

from worlds import EnvError, without_passwords
from worlds.flags import Refused


def command(name: str, work) -> None:
    """work(flags); a fault of the user's or of a file is one line, with exit status 2."""
    if hasattr(signal, "SIGPIPE"):  # `| head` ends it without a traceback
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        work(sys.argv[1:])
    except (Refused, EnvError, OSError) as error:
        print(f"{name}: {without_passwords(' '.join(str(error).split()))}", file=sys.stderr)
        sys.exit(2)


def visible(text: str) -> str:
    """`text` with control characters and others that a terminal may obey escaped, by number."""
    return "".join(c if c.isprintable() or c == "\n" else " " if c == "\t" else f"<{ord(c):02X}>"
                   for c in text.replace("\r\n", "\n"))


def whole(data: bytes, where) -> dict:
    """The JSON object in `data`; Refused where it is none."""
    try:
        value = json.loads(data)
        if isinstance(value, dict):
            return value
    except ValueError:
        pass
    start = textwrap.shorten(data[:200].decode(errors="replace"), 40)
    raise Refused(f"{where}: not a whole JSON object: {start!r}; restore it, or delete it")


def read(path: Path, growing: bool = False) -> list[dict]:
    """The objects of a .jsonl file; Refused, naming file and line, where one is not whole. growing:
    without a last line that is still being written."""
    if not path.is_file():
        raise Refused(f"{path}: no such file; is {path.parent} a run, and has it come that far?")
    lines = path.read_bytes().splitlines(keepends=True)
    if growing and lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    return [whole(line, f"{path}, line {n}") for n, line in enumerate(lines, 1)]


def config_of(run: Path) -> dict:
    """config.json of a run; Refused if the folder is not one."""
    if not (run / "config.json").is_file():
        raise Refused(f"{run}: not a run, it has no config.json; name a folder like "
                      "runs/webshop-coevolve-s0")
    return whole((run / "config.json").read_bytes(), run / "config.json")


def phases_of(run: Path) -> dict[str, dict]:
    """phases.json of a run, output -> what is recorded of it, with the iteration `i` of each."""
    path = run / "phases.json"
    rows = whole(path.read_bytes(), path) if path.exists() else {}
    for output, row in rows.items():
        found = re.match(r"iter(\d+)/", output)
        row.setdefault("i", int(found[1]) if found else 0)
    return rows


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
    """The kinds of pairs in a run, those with an expert first, then by the order of its agents."""
    kinds = {kind: 0 for row in of(phases, "make_pairs") for kind in row["pairs"]}
    order = {name: n for n, name in enumerate(["expert", *agents_of(phases)])}
    return sorted(kinds, key=lambda kind: [order.get(name, len(order))
                                           for name in kind.split(">")])
