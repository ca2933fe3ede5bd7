"""Locates the package appworld and its data, and reads the tasks and their solutions."""

import ast
import hashlib
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from filelock import FileLock

from common import ROOT
from common.settings import UsageError
from environments.appworld.python_code import calls_of
from environments.user_files import read_json

PACKAGE = "appworld==0.1.3.post1"  # pinned, because other versions come with different data
# run.sh creates this virtual environment, because the package pins library versions that conflict
# with those of this project.
VENV = ROOT / ".venv-appworld"
SOURCES = ("small.py", "families.py")  # files that define the small AppWorld
SMALL_SPLITS = ("train", "validation", "test", "unseen")
# {split of the official data: name of the file that lists its task ids}
OFFICIAL = {"train": "train", "validation": "dev", "test_normal": "test_normal",
            "test_challenge": "test_challenge"}
MAX_REPLIES = 30  # maximum number of replies per episode [AgentEvolver]


def interpreter() -> str:
    """Returns the path of the Python interpreter in whose environment appworld is installed."""
    if not (VENV / f"has-{PACKAGE.replace('==', '-')}").exists():
        raise UsageError(f"appworld: the package {PACKAGE} is not in {VENV}; "
                      "bash run.sh appworld --help installs it")
    return str(VENV / "bin/python")


def small_appworld() -> Path:
    """Returns the folder of the small AppWorld, which is created on first use.

    The folder's name contains a hash of the package's version and of the files in SOURCES.
    """
    here = Path(__file__).parent
    sources = [PACKAGE.encode(), *((here / name).read_bytes() for name in SOURCES)]
    name = hashlib.sha256(b"\0".join(sources)).hexdigest()[:16]
    folder = checked_path(ROOT / ".cache" / f"appworld-{name}")
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):  # if several runs start together, only one creates the folder
        if not folder.exists():
            print(f"appworld: making the small AppWorld in {folder}, once, for half a minute")
            with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                make_small_appworld(Path(temporary) / "small").rename(folder)
    return folder


def checked_path(folder: Path) -> Path:
    """Returns `folder`, or raises UsageError if its path contains "memory".

    The package creates a database in memory if the path of its file contains this word.
    """
    if "memory" in str(folder):
        raise UsageError(f"appworld: {folder} has 'memory' in its path, which the package takes "
                         "for a database without a file; move it")
    return folder


def make_small_appworld(folder: Path) -> Path:
    """Runs small.py to create the small AppWorld in a folder, and returns the folder."""
    script = Path(__file__).with_name("small.py")
    run = subprocess.run(
        [interpreter(), "-I", str(script), str(folder)], stdin=subprocess.DEVNULL, text=True,
        capture_output=True, env={"TZ": "UTC", "PYTHONHASHSEED": "0", "HOME": str(folder)})
    if run.returncode:
        *_, last = ["no message", *run.stderr.splitlines()]
        raise UsageError(f"appworld: the small AppWorld was not made ({last}); delete {VENV} and "
                         "run bash run.sh appworld --help, which installs the package again")
    return folder


@cache
def splits(root: Path, official: bool) -> dict[str, dict[str, dict]]:
    """Returns {split: {task id: {"start": task id}}}, in the order of the files of task ids."""
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
    file = root / "data" / name
    if not file.is_file():
        raise UsageError(f"--appworld-root {root}: {file} is missing; download the official data "
                         "with appworld download data --root FOLDER")
    return file


def solution(root: Path, key: str) -> list[str]:
    """Returns the code of a task's official solution, split by the function `parts`."""
    file = root / "data/tasks" / key / "ground_truth/compiled_solution.py"
    if not file.is_file():
        raise UsageError(f"appworld: task {key} has no solution in {file.parent}; use tasks of the "
                         "splits train and validation, which have solutions")
    return parts(file.read_text())


def parts(source: str) -> list[str]:
    """Splits the body of the function `solution` into parts. The expert sends one part per reply.

    Each part contains one top-level statement that calls APIs, such as an assignment or a whole
    loop, and neighbouring statements that call no API. If there are more than MAX_REPLIES parts,
    consecutive parts are joined.
    """
    module = ast.parse(source)
    function = next(node for node in module.body if isinstance(node, ast.FunctionDef))
    pieces = [""]
    has_call = False
    for statement in function.body:
        code = ast.unparse(statement)
        if calls_of(code):
            if has_call:
                pieces.append("")
            has_call = True
        pieces[-1] += f"{code}\n"
    size = -(-len(pieces) // MAX_REPLIES)
    return ["".join(pieces[n:n + size]).strip() for n in range(0, len(pieces), size)]


def specs(root: Path, key: str) -> dict:
    """Returns the specification of a task, with `instruction`, `supervisor` (a person) and more."""
    return read_json(root / "data/tasks" / key / "specs.json")


def start_changes(root: Path, key: str) -> dict[str, str]:
    """Returns the start state of a task, as changes {file name: text} to the shared databases."""
    folder = root / "data/tasks" / key / "dbs"
    return {file.name: file.read_text() for file in sorted(folder.iterdir())}


@cache
def documents(root: Path) -> dict[str, dict]:
    """Returns the documentation of all APIs, {"APP.API": document}."""
    by_name = {}
    for file in sorted((root / "data/api_docs/standard").glob("*.json")):
        for api, document in read_json(file).items():
            by_name[f"{file.stem}.{api}"] = document
    return by_name
