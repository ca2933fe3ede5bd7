"""Files of JSON lines, and what tells values and files from others."""

import hashlib
import json
import os
import shutil
from pathlib import Path

from common.settings import Refused


def read_json(file: Path) -> dict:
    """The JSON object in a file; Refused, naming it, unless it is whole."""
    return whole_object(file.read_text(encoding="utf-8", errors="replace"), file)


def read_jsonl(file: Path, growing: bool = False) -> list[dict]:
    """The objects of a file, one a line; Refused, naming file and line, where one is not whole.
    growing: without a last line that is still being written."""
    *lines, last = file.read_text(encoding="utf-8", errors="replace").split("\n")
    lines += [last] if last and not growing else []  # an empty file has no line
    return [whole_object(row, f"{file}, line {n}") for n, row in enumerate(lines, 1)]


def whole_object(text: str, where) -> dict:
    try:
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    except ValueError:
        pass
    raise Refused(f"{where}: {text[:40]!r} is no whole JSON object; restore the file, or delete it")


class Known(dict):
    """The trajectories that pairs may name, by task, agent, iteration and rollout."""

    def __missing__(self, key):
        raise Refused(f"a pair names {key}, which is no trajectory of this run; mend the pairs "
                      "file, or delete it to make it again")


def write_json(file: Path, value) -> None:
    """The value or what was there before: it appears by renaming."""
    part = file.with_name(f"{file.name}.tmp")
    part.write_text(json.dumps(value, indent=1))
    os.replace(part, file)


def remove(path: Path) -> None:
    """A file or folder, if it is there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def write_jsonl(file: Path, rows: list) -> None:
    """Objects, or the fields of dataclasses that are not None, one a line."""
    rows = (row if isinstance(row, dict) else
            {name: value for name, value in vars(row).items() if value is not None} for row in rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def hashed(value) -> str:
    """16 hexadecimal digits, the same ones for the same value as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def seed_of(*names) -> int:
    """48 bits, the same ones for the same names and numbers anywhere."""
    return int(hashlib.sha256("/".join(map(str, names)).encode()).hexdigest()[:12], 16)


def known_by(made, agents: dict[Path, str]):
    """What tells an input of a phase from another: of a file its bytes; of an agent how it was made
    (`agents`), since 27 GB take long to hash; of another folder name, size and last megabyte of
    each file; of what is not there, as on the hub, its name."""
    if isinstance(made, (dict, list, tuple)):
        return [known_by(part, agents) for part in (
            made.values() if isinstance(made, dict) else made)]
    if made.is_file():
        return hashlib.sha256(made.read_bytes()).hexdigest()
    if made in agents:
        return agents[made]
    found = []
    for file in sorted(filter(Path.is_file, made.glob("*.*"))):
        with open(file, "rb") as f:
            f.seek(max(0, (size := file.stat().st_size) - (1 << 20)))
            found.append([file.name, size, hashlib.sha256(f.read()).hexdigest()])
    return found or str(made)


def line(name: str, numbers: dict) -> str:
    """A name and its numbers in one line, those in dictionaries too; all else is left out."""
    flat = {}
    for key, value in numbers.items():
        flat |= value if isinstance(value, dict) else {key: value}
    return "  ".join([f"{name:28}", *(f"{key} {x:.3f}" if isinstance(x, float) else f"{key} {x:,}"
                                      for key, x in flat.items() if isinstance(x, (int, float)))])


def headline(s: dict) -> str:
    """Which run one of these settings is."""
    return f"{s['method']} on {s['env']}, model {s['model']}, seed {s['seed']}"


def table(title: str, done: dict[str, dict]) -> str:
    """What the phases of a run found, a line each: pairs, exploration, evaluation."""
    lines = [line(name, row) for work in ("make_pairs", "explore", "evaluate")
             for name, row in done.items() if row["work"] == work]
    seconds = sum(row["seconds"] for row in done.values())
    return "\n".join([title, *lines, f"{seconds:,.0f} s in all"])
