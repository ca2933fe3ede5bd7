"""Files of a run: whole or not there, with a hash, and one line where one is not what it was."""

import errno
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from lab.harness.settings import SettingsError
from worlds import EnvError, Refused, without_passwords

ROOT = Path(__file__).parents[2]  # of the project


class RunError(ValueError):
    """A folder or file that is not what a run writes; the text is one line for the user."""


def command(name: str, work) -> None:
    """work(flags); a fault of the user's or of a file is one line, with exit status 2."""
    if hasattr(signal, "SIGPIPE"):  # `| head` ends it without a traceback
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        work(sys.argv[1:])
    except (RunError, SettingsError, Refused, EnvError) as error:
        print(f"{name}: {without_passwords(' '.join(str(error).split()))}", file=sys.stderr)
        sys.exit(2)


def made_tasks(run: Path, phases) -> list[dict]:
    """Rows {id, task} of the tasks.jsonl files that a run's finished phases wrote, in their order;
    not those of training tasks, which have an id alone."""
    return [row for name in phases if Path(name).name == "tasks.jsonl"
            for row in read_jsonl(run / name) if "task" in row]


def read_jsonl(path, growing: bool = False) -> list[dict]:
    """The objects of a JSON-lines file; RunError naming file and line where one is not whole; if
    growing, without a last line that is still being written."""
    path = Path(path)
    if not path.is_file():
        raise RunError(f"{path}: no such file; is {path.parent} a run, and has it come that far?")
    lines = path.read_bytes().splitlines(keepends=True)
    if growing and lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    return [whole_object(line, f"{path}, line {number}", "delete the line or the file")
            for number, line in enumerate(lines, 1)]


def read_object(path: Path) -> dict:
    """The JSON object in a file; RunError unless it is whole."""
    return whole_object(path.read_bytes(), path, "restore it, or give another --out")


def whole_object(data: bytes, where, remedy: str) -> dict:
    try:
        value = json.loads(data.decode())
        if isinstance(value, dict):
            return value
    except ValueError:
        pass
    start = textwrap.shorten(data[:200].decode(errors="replace"), 40)
    raise RunError(f"{where}: not a whole JSON object: {start!r}; {remedy}")


# What a disk that is full, broken or not ours says.
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES,
              errno.EPERM}


def write_text(path: Path, text: str) -> None:
    """The whole text or nothing: written beside `path`, forced to the disk, then renamed."""
    temporary = path.with_name(path.name + ".part")
    with writing(path):
        temporary.write_text(text)
        replace(temporary, path)


def replace(temporary: Path, path: Path) -> None:
    """Renames a file or folder. Atomic and durable: readers see all or nothing, also after a power
    loss."""
    inside = sorted(temporary.rglob("*")) if temporary.is_dir() else []
    for part in [*inside, temporary]:
        force(part)
    os.replace(temporary, path)
    force(path.parent)


def force(path: Path) -> None:
    """Forces a file, or the names in a folder, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def writing(path: Path):
    """Adds `path` to an error of the disk (UNWRITABLE) that names no file."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from None
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def held(path: Path, wait: bool = False) -> FileLock | None:
    """The lock on a file, until it is released or the process ends; None where another has it."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        return None
    return lock


def hashed(value) -> str:
    """sha256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def digest(path: Path) -> str:
    """sha256 over a file, or over the names and contents of a folder's files."""
    total = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
        total.update(f"{file.name} {file.stat().st_size} ".encode())
        with open(file, "rb") as f:
            while block := f.read(1 << 20):
                total.update(block)
    return total.hexdigest()


def code_hash() -> str:
    """A hash of this project's Python files, changed by every edit of what a run executes."""
    ours = "engine", "harness", "training", "playing", "baselines"
    folders = ".", "worlds", "worlds/*", "lab", *(f"lab/{name}" for name in ours)
    files = [f for folder in folders for f in sorted(ROOT.glob(f"{folder}/*.py"))]
    return hashlib.sha256("".join(map(digest, files)).encode()).hexdigest()


def git_commit() -> str | None:
    """The commit of this copy, with -dirty if files differ from it."""
    if not shutil.which("git"):
        return None
    git = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
                         capture_output=True, text=True, cwd=ROOT)
    return git.stdout.strip() or None


def versions() -> dict:
    return {"python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "tokenizers", "accelerate",
                                              "numpy")}}


def run_path(s) -> Path:
    """The folder of a run with settings `s`."""
    return Path(s.out or f"runs/{s.env}-{s.method}-s{s.seed}{'-quick' * s.quick}")


def seed_of(*parts) -> int:
    """A 48-bit seed from names and numbers: the same parts give the same seed anywhere."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:6], "big")


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0
