"""The files of a run: JSON and JSON lines, locks, and hashes that identify inputs."""

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
    """Returns the JSON object in a file. Raises UsageError if it is not complete."""
    return parse_object(file.read_bytes(), file)


def read_jsonl(file: Path) -> list[dict]:
    """Returns the JSON objects in a file, one per line.

    Raises UsageError with the line number if an object is not complete.
    """
    lines = file.read_bytes().split(b"\n")
    if not lines[-1]:  # the file ends with a line break
        lines.pop()
    return [parse_object(line, f"{file}, line {n}") for n, line in enumerate(lines, 1)]


def parse_object(data: bytes, location) -> dict:
    try:
        value = json.loads(data.decode())
    except ValueError:  # no JSON, or no UTF-8
        value = None
    if isinstance(value, dict):
        return value
    start = data.decode(errors="replace")[:40]
    raise UsageError(f"{location}: {start!r} is no complete JSON object in UTF-8; restore the "
                     "file, or delete it")


def write_json(file: Path, value) -> None:
    """Writes a value as JSON.

    The file is written under a temporary name and then renamed, so that an interruption leaves
    either the old file or the new one.
    """
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_text(json.dumps(value, indent=1))
    os.replace(temporary, file)


def write_jsonl(file: Path, rows: list) -> None:
    """Writes dictionaries, or the fields of dataclasses that are not None, one per line."""
    with open(file, "w") as lines:
        for row in rows:
            if not isinstance(row, dict):
                values = {field.name: getattr(row, field.name) for field in fields(row)}
                row = {name: value for name, value in values.items() if value is not None}
            lines.write(json.dumps(row) + "\n")


def whole_lines(file: Path) -> list[dict]:
    """Returns the JSON objects in a log, or an empty list if there is no log.

    An incomplete last line, which an interruption may leave, is removed from the file.
    """
    if not file.exists():
        return []
    data = file.read_bytes()
    os.truncate(file, data.rfind(b"\n") + 1)
    return read_jsonl(file)


def plain(values: dict) -> dict:
    """Returns values as JSON represents them, with scalars of numpy and torch as numbers.

    Raises TypeError or ValueError with the name of a value that JSON cannot represent.
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
    raise TypeError(f"{value!r:.60} is no number, string, list or dictionary")


def remove(path: Path) -> None:
    """Deletes a file, a folder or a link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def lock(folder: Path):
    """Locks a run's folder against other processes, and returns the lock.

    A disk that does not support locks is used without one. Raises UsageError if another process
    holds the lock.
    """
    # A singleton is reentrant in its process, so a notebook can repeat a cell that failed.
    lock = FileLock(folder / "lock", is_singleton=True)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise UsageError(f"--out {folder}: another process is running in this folder; wait for it, "
                         "or give another folder") from None
    except (OSError, NotImplementedError):
        pass
    return lock


def run_of(agent: Path) -> Path | None:
    """Returns the folder of the run that made an agent, or None if its folder is in no run."""
    for folder in agent.resolve().parents[:2]:
        if (folder / "phases.json").exists():
            return folder
    return None


# ------------------------------------------------------------------------------ hashes and seeds


def hash_of(value) -> str:
    """Returns a hash of a value's JSON, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def seed_of(*names) -> int:
    """Returns a seed of 48 bits, which depends only on the given names and numbers."""
    return int(hashlib.sha256("/".join(map(str, names)).encode()).hexdigest()[:12], 16)


def input_key(given, agents: dict[Path, str]):
    """Returns the key of a phase's input, which changes when the input does.

    Args:
        given: A path, or a list or dictionary of inputs.
        agents: Keys by path. An agent of the run has the cache key of its phase, and a base model
            from the hub has its commit.

    Returns:
        The key in `agents`, if the path has one. Otherwise a hash of a file's bytes, or the names
        and hashes of a folder's files. For several inputs, a list of keys.
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
    hashes = []
    for file in sorted(given.glob("*.*")):
        if file.is_file():
            hashes.append([file.name, file_hash(file)])
    return hashes or str(given)


def files_in(given) -> list[Path]:
    """Returns the files among a phase's inputs, which have the form that `input_key` takes."""
    if isinstance(given, Path):
        return [given] if given.is_file() else []
    files = []
    for part in given.values() if isinstance(given, dict) else given:
        files += files_in(part)
    return files


def is_edited(file: Path, row: dict) -> bool:
    """Returns True if a file has changed since its phase, with the record `row`, wrote it."""
    return "hash" in row and file.is_file() and file_hash(file) != row["hash"]


def file_hash(file: Path) -> str:
    """Returns a hash of a file's bytes.

    The hash is cached until the file's size or time of change differs, so that a large file is read
    only once.
    """
    stat = file.stat()
    return digest_of(file, stat.st_size, stat.st_mtime_ns)


@cache
def digest_of(file: Path, size: int, changed: int) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as content:
        while chunk := content.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()
