"""The files of a run: JSON lines, locks, and what tells one file from another."""

import hashlib
import json
import os
import shutil
from dataclasses import fields
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from common.settings import UsageError

# ------------------------------------------------------------------------------ reading, writing


def read_json(file: Path) -> dict:
    """The JSON object in a file; Refused, naming it, unless it is whole."""
    return whole_object(file.read_bytes(), file)


def read_jsonl(file: Path) -> list[dict]:
    """The objects in a file, one a line; Refused, naming the line, where one is not whole."""
    lines = file.read_bytes().split(b"\n")
    if not lines[-1]:  # what follows the last line's end
        lines.pop()
    return [whole_object(line, f"{file}, line {n}") for n, line in enumerate(lines, 1)]


def whole_object(data: bytes, where) -> dict:
    try:
        value = json.loads(data.decode())
    except ValueError:  # also where it is not UTF-8
        value = None
    if isinstance(value, dict):
        return value
    begins = data.decode(errors="replace")[:40]
    raise UsageError(f"{where}: {begins!r} is no whole JSON object in UTF-8; restore the file, or "
                  "delete it")


def write_json(file: Path, value) -> None:
    """Writes a value as JSON. It appears by renaming, so that a stop leaves it or what was there.
    """
    part = file.with_name(f"{file.name}.tmp")
    part.write_text(json.dumps(value, indent=1))
    os.replace(part, file)


def write_jsonl(file: Path, rows: list) -> None:
    """Writes objects, or the fields of dataclasses that are not None, one a line."""
    with open(file, "w") as lines:
        for row in rows:
            if not isinstance(row, dict):
                values = {field.name: getattr(row, field.name) for field in fields(row)}
                row = {name: value for name, value in values.items() if value is not None}
            lines.write(json.dumps(row) + "\n")


def whole_lines(file: Path) -> list[dict]:
    """The objects in a log, if it is there. What a stop left behind its last whole line is cut off.
    """
    if not file.exists():
        return []
    data = file.read_bytes()
    os.truncate(file, data.rfind(b"\n") + 1)
    return read_jsonl(file)


def plain(values: dict) -> dict:
    """Return values as JSON has them, scalars of numpy and torch as numbers.

    Raises TypeError or ValueError, naming the value, if JSON cannot hold it.
    """
    converted = {}
    for name, value in values.items():
        try:
            text = json.dumps(value, allow_nan=False, default=scalar)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
        converted[str(name)] = json.loads(text)
    return converted


def scalar(value):
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"{value!r:.60} is no number, text, list or dictionary")


def remove(path: Path) -> None:
    """Deletes a file, a folder or a link, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def lock(folder: Path):
    """Locks a run's folder against other processes, and returns the lock. Raises Refused if another
    process has it. A disk without locks keeps nobody out."""
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise UsageError(f"--out {folder}: another process is running in this folder; wait for it or "
                      "give another") from None
    except (OSError, NotImplementedError):
        pass
    return lock


def run_of(agent: Path) -> Path | None:
    """Returns the folder of the run that made an agent, or None if its folder is in no run."""
    for folder in agent.resolve().parents[:2]:
        if (folder / "phases.json").exists():
            return folder
    return None


# -------------------------------------------------------------------- what tells one from another


def hash_of(value) -> str:
    """16 hexadecimal digits, the same ones for the same value as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def seed_of(*names) -> int:
    """48 bits, the same ones for the same names and numbers anywhere."""
    return int(hashlib.sha256("/".join(map(str, names)).encode()).hexdigest()[:12], 16)


def input_key(given, agents: dict[Path, str]):
    """What tells an input of a phase from another.

    Args:
        given: A path, or a list or dictionary of inputs.
        agents: The run's agents, and how each was made; a base on the hub, and its commit.

    Returns:
        Of a file its bytes, hashed; of an agent of the run how it was made; of a base on the hub
        its commit; of another folder the bytes of its files; of several a list.
    """
    if isinstance(given, dict):
        given = list(given.values())
    if isinstance(given, (list, tuple)):
        return [input_key(part, agents) for part in given]
    if not isinstance(given, Path):
        raise TypeError(f"the input {given!r:.60} is no path; give files first, and values by name")
    if given.is_file():
        return file_hash(given)
    if given in agents:
        return agents[given]
    found = []
    for file in sorted(given.glob("*.*")):
        if file.is_file():
            found.append([file.name, file_hash(file)])
    return found or str(given)


def files_in(given) -> list[Path]:
    """Return the files among a phase's inputs, which are those of `input_key`."""
    if isinstance(given, Path):
        return [given] if given.is_file() else []
    files = []
    for part in given.values() if isinstance(given, dict) else given:
        files += files_in(part)
    return files


def is_edited(file: Path, row: dict) -> bool:
    """Return True if a file's content is not what the phase wrote whose record `row` is."""
    return "hash" in row and file.is_file() and file_hash(file) != row["hash"]


def file_hash(file: Path) -> str:
    """A hash of a file's bytes, of which a large one is read once, as long as it stays as it is."""
    stat = file.stat()
    return digest_of(file, stat.st_size, stat.st_mtime_ns)


@cache
def digest_of(file: Path, size: int, changed: int) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as content:
        while part := content.read(1 << 24):
            digest.update(part)
    return digest.hexdigest()
