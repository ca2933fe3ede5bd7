"""The structure: imports point one way, lab/ changes no result, and the core runs alone."""

import ast
import json
import os
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
from conftest import ROOT

# A room is a folder or file at the top level. It may import these rooms, and what they may import.
ROOMS = dict(lab="evolve", evolve="coevolve grpo", coevolve="engine", grpo="dpo",
             engine="environments dpo", environments="envs", envs="common", common="", dpo="")
METHOD = "coevolve", "dpo", "envs"  # the three files
# room -> the packages that it may import beside the standard library
PACKAGES = dict(common="filelock", envs="", coevolve="", dpo="torch", grpo="torch", evolve="torch",
                engine="torch transformers accelerate safetensors tqdm")
TENSORS = {"torch", "transformers", "accelerate", "tokenizers", "safetensors"}
# Classes of engine/ that determine the results of a run. Nothing in lab/ extends them.
MAKERS = {"Run", "Machine", "CachedGenerator", "TokenSampler", "Sampler", "Template"}
FILES = {}  # module -> its syntax tree
for part in "*.py", "common/*.py", "environments/**/*.py", "engine/*.py", "lab/**/*.py":
    for file in sorted(ROOT.glob(part)):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        FILES[module] = ast.parse(file.read_text(encoding="utf-8"))


def below(room: str) -> set[str]:
    """Returns the room, and all rooms that it may import."""
    return {room}.union(*map(below, ROOMS[room].split()))


def imported(module: str):
    """Yields the full name and the name in the file of all that a module imports, also inside
    functions."""
    for node in ast.walk(FILES[module]):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert not getattr(node, "level", 0), f"line {node.lineno}: a relative import"
            parent = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                yield parent + alias.name, alias.asname or alias.name


def imports(module: str, parts: int = 9) -> set[str]:
    """Returns the names of imported modules and objects, each cut after a number of parts."""
    names = {name for name, _ in imported(module)}
    names |= {name.rpartition(".")[0] or name for name in names}
    return {".".join(name.split(".")[:parts]) for name in names}


@pytest.mark.parametrize("module", FILES)
def test_imports_point_one_way(module):
    room = module.split(".")[0]
    names = imports(module, 1)
    assert names & {*ROOMS, "tests", "conftest"} <= below(room)
    if room in PACKAGES:
        assert names <= below(room) | {*PACKAGES[room].split()} | sys.stdlib_module_names
    if room == "environments":
        assert not names & TENSORS
    if room in METHOD:  # at the top of the file only
        nested = {node for node in ast.walk(FILES[module]) if "Import" in type(node).__name__}
        assert nested <= {*FILES[module].body} and "importlib" not in names


def test_imports_have_no_cycle_between_modules_or_between_rooms_of_lab():
    needs = {name: imports(name) & {*FILES} - {name} for name in FILES}
    for name in FILES:  # lab.chat stands for lab.chat.play
        room = ".".join(name.split(".")[:2])
        if room.startswith("lab."):
            others = {f"{other}.*" for other in imports(name, 2) - {room}}
            needs.setdefault(f"{room}.*", set()).update(others)
    TopologicalSorter(needs).prepare()  # raises CycleError


@pytest.mark.parametrize("module", [name for name in FILES if name.startswith("lab.")])
def test_nothing_in_lab_changes_results(module):
    """No class extends one of MAKERS, and no name of another module gets another value."""
    others = {own for name, own in imported(module) if name.split(".")[0] in ROOMS}
    for node in ast.walk(FILES[module]):
        if isinstance(node, ast.ClassDef):
            assert not {ast.unparse(base).split(".")[-1] for base in node.bases} & MAKERS
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            assert ast.unparse(node.value) not in others, ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            assert ast.unparse(node.args[0]) not in others, ast.unparse(node)


def test_the_core_runs_to_its_result_in_an_empty_folder(tmp_path):
    for name in METHOD:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    for name in "engine", "common", "environments", "tiny":
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    flags = ("--env intercodesql --train-tasks 2 --eval-tasks 1 --sft-epochs 1 --max-new-tokens 16 "
             "--iterations 1 --dpo-epochs 1 --rollouts 2 --out run")
    done = subprocess.run([sys.executable, "coevolve.py", *flags.split()], cwd=tmp_path, text=True,
                          env=os.environ | dict(PYTHONPATH=""), capture_output=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    outputs = json.loads((tmp_path / "run/phases.json").read_text())
    assert "iter1/target-agent" in outputs
    for output in outputs:
        assert (tmp_path / "run" / output).exists() and f"{output} " in done.stdout
