"""Locates AppWorld's package and data, and reads its tasks and their solutions."""

import ast
import hashlib
import itertools
import json
import re
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from filelock import FileLock

from common.settings import UsageError

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = "appworld==0.1.3.post1"  # other versions have other data
# run.sh makes it. The package pins other versions of libraries than this project needs.
VENV = PROJECT / ".venv-appworld"
SOURCES = ("small.py", "families.py")  # files that define the small AppWorld
SMALL_SPLITS = ("train", "validation", "test", "unseen")
OFFICIAL = {"train": "train", "validation": "dev", "test_normal": "test_normal",
            "test_challenge": "test_challenge"}  # split -> its file of task ids
MAX_REPLIES = 30  # [AgentEvolver]


def interpreter() -> str:
    """Returns the path of the Python that has the package. Raises UsageError if there is none."""
    name = PACKAGE.replace("==", "-")
    if not (VENV / f"has-{name}").exists():
        raise UsageError(f"appworld: the package {PACKAGE} is not in {VENV}; "
                      "bash run.sh appworld --help installs it")
    return str(VENV / "bin/python")


def small_appworld() -> Path:
    """Returns the folder of the small AppWorld, which is made on first use."""
    here = Path(__file__).parent
    sources = [PACKAGE.encode(), *((here / name).read_bytes() for name in SOURCES)]
    name = hashlib.sha256(b"\0".join(sources)).hexdigest()[:16]
    folder = checked_path(PROJECT / ".cache" / f"appworld-{name}")
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):  # if several runs start together, one of them makes it
        if not folder.exists():
            print(f"appworld: making the small AppWorld in {folder}, once, for half a minute")
            with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                make_small_appworld(Path(temporary) / "small").rename(folder)
    return folder


def checked_path(folder: Path) -> Path:
    """Returns the folder. Raises UsageError if the package would not read its files."""
    if "memory" in str(folder):
        raise UsageError(f"appworld: {folder} has 'memory' in its path, which the package takes "
                         "for a database without a file; move it")
    return folder


def make_small_appworld(folder: Path) -> Path:
    """Makes the small AppWorld in a folder, and returns it. Raises UsageError if the package
    fails."""
    script = Path(__file__).with_name("small.py")
    run = subprocess.run(
        [interpreter(), "-I", str(script), str(folder)], stdin=subprocess.DEVNULL, text=True,
        capture_output=True, env={"TZ": "UTC", "PYTHONHASHSEED": "0", "HOME": str(folder)})
    if run.returncode:
        *_, last = ["no message", *run.stderr.splitlines()]
        raise UsageError(f"appworld: the small AppWorld was not made ({last}); delete {VENV} and "
                         "run bash run.sh appworld --help, which installs the package again")
    return folder


@lru_cache(None)
def splits(root: Path, official: bool) -> dict[str, dict[str, dict]]:
    """Returns the tasks, split -> key -> {start: key}, in the order of the files of task ids."""
    tasks, files = {}, OFFICIAL if official else {name: name for name in SMALL_SPLITS}
    for split, name in files.items():
        keys = existing(root, f"datasets/{name}.txt").read_text().split()
        for key in keys:
            existing(root, f"tasks/{key}/specs.json")
        tasks[split] = {key: dict(start=key) for key in keys}
    for shared in ("base_dbs/phone.db", "api_docs/standard/phone.json"):
        existing(root, shared)
    return tasks


def existing(root: Path, name: str) -> Path:
    """Returns the path of a file of the data. Raises UsageError if it is missing."""
    file = root / "data" / name
    if not file.is_file():
        raise UsageError(f"--appworld-root {root}: {file} is missing; download the official data "
                         "with appworld download data --root FOLDER")
    return file


def solution(root: Path, key: str) -> list[str]:
    """Returns the code of a task's solution in parts, see `parts`. Raises UsageError if the task
    has none."""
    file = root / "data/tasks" / key / "ground_truth/compiled_solution.py"
    if not file.is_file():
        raise UsageError(f"appworld: task {key} has no solution in {file.parent}; use tasks of the "
                         "splits train and validation, which have solutions")
    return parts(file.read_text())


def parts(source: str) -> list[str]:
    """Splits the body of the function `solution` into parts, one reply each.

    Each part calls one API. If there are more than MAX_REPLIES parts, consecutive ones are joined.
    A statement, also a loop, stays whole.
    """
    module = ast.parse(source)
    function = next(node for node in module.body if isinstance(node, ast.FunctionDef))
    pieces, has_call = [[]], False
    for statement in function.body:
        calls = bool(calls_in(statement))
        if calls and has_call:
            pieces.append([])
        has_call = calls or has_call
        pieces[-1].append(ast.unparse(statement))
    size = -(-len(pieces) // MAX_REPLIES)
    groups = [pieces[n:n + size] for n in range(0, len(pieces), size)]
    return ["\n".join(itertools.chain(*group)) for group in groups]


def calls_in(tree: ast.AST) -> list[str]:
    """Returns the names APP.API of the APIs that a piece of code calls, in the order of the
    text."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            match = re.fullmatch(r"apis\.(\w+\.\w+)", ast.unparse(node.func))
            if match:
                names.append((node.lineno, node.col_offset, match[1]))
    return [name for _, _, name in sorted(names)]


def specs(root: Path, key: str) -> dict:
    """Returns the specification of a task, with its `instruction` and the person, `supervisor`."""
    return json.loads((root / "data/tasks" / key / "specs.json").read_text())


def start_changes(root: Path, key: str) -> dict[str, str]:
    """Returns how a task's start state differs from the shared databases, file -> text, in the form
    in which an episode saves its changes."""
    folder = root / "data/tasks" / key / "dbs"
    return {file.name: file.read_text() for file in sorted(folder.iterdir())}


@lru_cache(None)
def documents(root: Path) -> dict[str, dict]:
    """Returns the documents of all APIs, by APP.API."""
    by_name = {}
    for file in sorted((root / "data/api_docs/standard").glob("*.json")):
        for api, document in json.loads(file.read_text()).items():
            by_name[f"{file.stem}.{api}"] = document
    return by_name
