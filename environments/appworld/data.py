"""Where AppWorld's package and its data are; what its tasks and their solutions are."""

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
PACKAGE = "appworld==0.1.3.post1"  # others have other data
VENV = PROJECT / ".venv-appworld"  # its pins are others than ours; run.sh makes it
MADE_BY = ("small.py", "families.py")
SMALL = ("train", "validation", "test", "unseen")
OFFICIAL = {"train": "train", "validation": "dev", "test_normal": "test_normal",
            "test_challenge": "test_challenge"}  # split -> its file of ids
MOST_REPLIES = 30  # [AgentEvolver]


def interpreter() -> str:
    """The Python that has the package; Refused where there is none."""
    name = PACKAGE.replace("==", "-")
    if not (VENV / f"has-{name}").exists():
        raise UsageError(f"appworld: the package {PACKAGE} is not in {VENV}; "
                      "bash run.sh appworld --help installs it")
    return str(VENV / "bin/python")


def small_world() -> Path:
    """The folder of the small world, made on first use."""
    here = Path(__file__).parent
    made_by = [PACKAGE.encode(), *((here / name).read_bytes() for name in MADE_BY)]
    name = hashlib.sha256(b"\0".join(made_by)).hexdigest()[:16]
    folder = usable(PROJECT / ".cache" / f"appworld-{name}")
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):  # of runs that start together one makes it
        if not folder.exists():
            print(f"appworld: making the small world, half a minute; once, in {folder}")
            with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                make(Path(temporary) / "small").rename(folder)
    return folder


def usable(folder: Path) -> Path:
    """The folder; Refused where the package would look for no file in it."""
    if "memory" in str(folder):
        raise UsageError(f"appworld: {folder} has 'memory' in its path, which the package takes for a "
                      "database without a file; move it")
    return folder


def make(folder: Path) -> Path:
    """Makes the small world in a folder; Refused where the package does not."""
    script = Path(__file__).with_name("small.py")
    done = subprocess.run(
        [interpreter(), "-I", str(script), str(folder)], stdin=subprocess.DEVNULL, text=True,
        capture_output=True, env={"TZ": "UTC", "PYTHONHASHSEED": "0", "HOME": str(folder)})
    if done.returncode:
        *_, last = ["no message", *done.stderr.splitlines()]
        raise UsageError(f"appworld: the small world was not made ({last}); delete {VENV} and run "
                      "bash run.sh appworld --help, which installs the package anew")
    return folder


@lru_cache(None)
def splits(root: Path, official: bool) -> dict[str, dict[str, dict]]:
    """Split -> key -> task, {start: key}, in the order of the files."""
    found, files = {}, OFFICIAL if official else {name: name for name in SMALL}
    for split, name in files.items():
        keys = existing(root, f"datasets/{name}.txt").read_text().split()
        for key in keys:
            existing(root, f"tasks/{key}/specs.json")
        found[split] = {key: dict(start=key) for key in keys}
    for shared in ("base_dbs/phone.db", "api_docs/standard/phone.json"):
        existing(root, shared)
    return found


def existing(root: Path, name: str) -> Path:
    """A file of the data; Refused where it is missing."""
    file = root / "data" / name
    if not file.is_file():
        raise UsageError(f"--appworld-root {root}: {file} is not there; appworld download data --root "
                      "gets the official data")
    return file


def solution(root: Path, key: str) -> list[str]:
    """The code of a task's solution, one call of an interface in each part as far as it goes."""
    file = root / "data/tasks" / key / "ground_truth/compiled_solution.py"
    if not file.is_file():
        raise UsageError(f"appworld: task {key} has no solution in {file.parent}; experts are those "
                      "of the splits train and validation")
    return parts(file.read_text())


def parts(source: str) -> list[str]:
    """The body of `solution` in parts that each call one interface, MOST_REPLIES at most. A loop,
    like any statement, stays whole."""
    module = ast.parse(source)
    function = next(node for node in module.body if isinstance(node, ast.FunctionDef))
    found, called = [[]], False
    for statement in function.body:
        calls = bool(calls_in(statement))
        if calls and called:
            found.append([])
        called = calls or called
        found[-1].append(ast.unparse(statement))
    together = -(-len(found) // MOST_REPLIES)
    groups = [found[n:n + together] for n in range(0, len(found), together)]
    return ["\n".join(itertools.chain(*group)) for group in groups]


def calls_in(tree: ast.AST) -> list[str]:
    """The names APP.API of the interfaces that a piece of code calls, in the order of the text."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = re.fullmatch(r"apis\.(\w+\.\w+)", ast.unparse(node.func))
            if called:
                found.append((node.lineno, node.col_offset, called[1]))
    return [name for _, _, name in sorted(found)]


def specs(root: Path, key: str) -> dict:
    """What a task asks for, `instruction`, and of whom, `supervisor`."""
    return json.loads((root / "data/tasks" / key / "specs.json").read_text())


def start_changes(root: Path, key: str) -> dict[str, str]:
    """What a task's start state is, over the databases that all share, as an episode saves it."""
    folder = root / "data/tasks" / key / "dbs"
    return {file.name: file.read_text() for file in sorted(folder.iterdir())}


@lru_cache(None)
def documents(root: Path) -> dict[str, dict]:
    """The documents of all interfaces, by APP.API."""
    found = {}
    for file in sorted((root / "data/api_docs/standard").glob("*.json")):
        for api, document in json.loads(file.read_text()).items():
            found[f"{file.stem}.{api}"] = document
    return found
