"""Helpers for the files of a run: reading and writing JSON, file locks, hashes and seeds."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from common.settings import UsageError

# ------------------------------------------------------------------------------ reading, writing


def read_json(file: Path) -> dict:
    """Returns the JSON object in a file. Raises UsageError if it is incomplete."""
    return parse_object(file.read_bytes(), file)


def read_jsonl(file: Path) -> list[dict]:
    """Returns the rows of a JSON lines file.

    Raises UsageError with the line number if a line is not a valid JSON object.
    """
    lines = file.read_bytes().split(b"\n")
    if not lines[-1]:  # the file ends with a line break
        lines.pop()
    return [parse_object(line, f"{file}, line {n}") for n, line in enumerate(lines, 1)]


def parse_object(data: bytes, location) -> dict:
    try:
        value = json.loads(data.decode())
    except ValueError:  # the data is not valid JSON or not valid UTF-8
        value = None
    if isinstance(value, dict):
        return value
    start = data.decode(errors="replace")[:40]
    raise UsageError(f"{location}: {start!r} is no complete JSON object in UTF-8; restore the "
                     "file, or delete it")


def write_json(file: Path, value) -> None:
    """Writes a value to a JSON file. An interrupted write leaves the old content of the file."""
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_text(json.dumps(value, indent=1))
    os.replace(temporary, file)


def json_line(row) -> str:
    """Returns a dict, or a dataclass object without its None fields, as a JSON line."""
    if not isinstance(row, dict):
        values = {field.name: getattr(row, field.name) for field in fields(row)}
        row = {name: value for name, value in values.items() if value is not None}
    return json.dumps(row, default=scalar) + "\n"


def whole_lines(file: Path) -> list[dict]:
    """Returns the rows of a JSON lines file, or an empty list if the file does not exist.

    If an interrupted program has left an incomplete last line, this line is deleted from the file.
    """
    if not file.exists():
        return []
    data = file.read_bytes()
    os.truncate(file, data.rfind(b"\n") + 1)
    return read_jsonl(file)


def plain(values: dict) -> dict:
    """Converts the values of a dict to plain JSON types.

    For example, tuples become lists, and numpy or torch scalars become numbers. Raises TypeError or
    ValueError if JSON cannot represent a value.
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


OLDER = "an older version of this program made this run; give another folder, or use that version"


def check_version(given: str, rows: dict[str, dict]) -> None:
    """Raises UsageError if an older version of this program wrote the records of a phases.json.

    `given` is the flag that names the run, with its value, such as "--out runs/a".
    """
    if any("hash" in row and "content" not in row for row in rows.values()):
        raise UsageError(f"{given}: {OLDER}")


def remove(path: Path) -> None:
    """Deletes a file, a folder or a symbolic link. Does nothing if the path does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def copy_folder(
    source: Path,
    target: Path,
    copy: Callable = shutil.copyfile,
    without: str | None = None,
) -> None:
    """Copies a folder to a new folder, and calls copy(source, target) for each file.

    The copies get the default mode under the umask, not the mode of the originals. Files whose
    suffix is `without` are left out.
    """
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_dir():
            copy_folder(path, target / path.name, copy, without)
        elif path.suffix != without:
            copy(path, target / path.name)


def share_weights(folder: Path) -> None:
    """Gives the weight files of a model the same mode as its config.json.

    Otherwise only their owner could read them, because safetensors ignores the umask: it writes a
    private temporary file and renames it.
    """
    mode = (folder / "config.json").stat().st_mode
    for file in folder.glob("*.safetensors"):
        if file.stat().st_mode != mode:
            file.chmod(mode)


def lock(folder: Path):
    """Locks the folder of a run, so that no other process can use it, and returns the lock.

    On a file system that does not support locks, the folder stays unlocked. Raises UsageError if
    another process has locked the folder.
    """
    # With is_singleton, the same process can acquire the lock again. In a notebook, a cell may fail
    # after it has acquired the lock, and may then be executed again.
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
    """Returns the folder of the run that an agent's folder is in, or None."""
    for folder in agent.resolve().parents[:2]:
        if (folder / "phases.json").exists():
            return folder
    return None


# ------------------------------------------------------------------------------ hashes and seeds


def hash_of(value) -> str:
    """Returns the hash of a JSON-serialisable value as 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def seed_of(*names) -> int:
    """Returns a 48-bit seed that is a hash of the given names and numbers."""
    return int(hashlib.sha256("/".join(map(str, names)).encode()).hexdigest()[:12], 16)


def is_edited(file: Path, row: dict) -> bool:
    """Returns True if the output file of a phase was edited after the phase wrote it.

    The file is read only if its size or its modification time has changed. `row` is the phase's
    record in phases.json.
    """
    return file.is_file() and stat_of(file) != row.get("stat") and file_hash(file) != row["hash"]


def stat_of(file: Path) -> list[int]:
    """Returns the size of a file in bytes, and its modification time in nanoseconds."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]


def file_hash(file: Path) -> str:
    """Returns the SHA-256 hash of a file, cached until its size or modification time changes."""
    return digest_of(file, *stat_of(file))


@cache
def digest_of(file: Path, size: int, changed: int) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as content:
        while chunk := content.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()
