"""The structure: imports point one way, and the core runs alone."""

import ast
import json
import os
import shutil
import subprocess
import sys

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
FILES = {}  # module -> its syntax tree
for part in "*.py", "common/*.py", "environments/**/*.py", "engine/*.py", "lab/**/*.py":
    for file in sorted(ROOT.glob(part)):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        FILES[module] = ast.parse(file.read_text(encoding="utf-8"))


def below(room: str) -> set[str]:
    """Returns the room, and all rooms that it may import."""
    return {room}.union(*map(below, ROOMS[room].split()))


def imports(module: str) -> set[str]:
    """Returns the top-level names of all that a module imports, also inside functions."""
    names = set()
    for node in ast.walk(FILES[module]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("module", FILES)
def test_imports_point_one_way(module):
    room = module.split(".")[0]
    names = imports(module)
    assert names & {*ROOMS, "tests", "conftest"} <= below(room)
    if room in PACKAGES:
        assert names <= below(room) | {*PACKAGES[room].split()} | sys.stdlib_module_names
    if room == "environments":
        assert not names & TENSORS


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
