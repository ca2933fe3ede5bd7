"""The structure: imports point one way, lab/ changes no result, and the core runs alone."""

import ast
import json
import os
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from conftest import ROOT

METHOD = ("coevolve", "dpo", "envs")  # the three files
# A room is a folder or file at the top level. It may import these rooms, without a cycle.
MAY = {"common": set(), "envs": {"common"}, "environments": {"common", "envs"}, "dpo": set(),
       "engine": {"dpo", "envs", "environments", "common"}}
MAY["coevolve"] = {*MAY["engine"], "engine"}
MAY["evolve"] = {*MAY["coevolve"], "coevolve"}
MAY["lab"] = {*MAY["evolve"], "evolve"}
# room -> the packages that it may import beside the standard library
PACKAGES = {"common": {"filelock"}, "envs": set(), "coevolve": set(), "dpo": {"torch"}, "evolve": {"torch"},
            "engine": {"torch", "transformers", "accelerate", "safetensors", "tqdm"}}
TENSORS = {"torch", "transformers", "accelerate", "tokenizers", "safetensors"}
# Classes of engine/ that determine the results of a run. Nothing in lab/ extends them.
MAKERS = {"Run", "Machine", "CachedGenerator", "TokenSampler", "Sampler", "Template"}
FILES = [file for name in ("*.py", "common/*.py", "environments/**/*.py", "engine/*.py", "lab/**/*.py")
         for file in sorted(ROOT.glob(name))]


def nodes(path: Path):
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Returns the names of all modules and objects that a file imports, also inside functions."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}, line {node.lineno}: a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and room(path) in METHOD:
            assert "import" not in ast.unparse(node.func), f"{path}: an import by call"
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    own = room(path)
    names = {name.split(".")[0] for name in imported(path)}
    assert names & {*MAY, "tests", "conftest"} <= MAY[own] | {own}
    if own in PACKAGES:
        assert names <= MAY[own] | {own} | PACKAGES[own] | {*sys.stdlib_module_names}
    if own == "environments":
        assert not names & TENSORS
    if own in METHOD:  # no import inside a function
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                inside = [type(part) for part in ast.walk(node)]
                assert not {ast.Import, ast.ImportFrom} & {*inside}


def test_imports_have_no_cycle_between_modules_or_between_rooms_of_lab():
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    of_modules = {}
    of_rooms = {}
    for name, path in modules.items():
        others = imported(path) & {*modules} - {name}
        of_modules[name] = others
        if room(path) == "lab":
            own = room_of_lab(name)
            of_rooms.setdefault(own, set()).update({*map(room_of_lab, others)} - {own})
    for needs in of_modules, of_rooms:
        TopologicalSorter(needs).prepare()  # raises CycleError


def room_of_lab(module: str) -> str:
    """Returns lab.chat for lab.chat.play, and lab.learn for itself."""
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize("path", [path for path in FILES if room(path) == "lab"],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_in_lab_changes_results(path):
    """No class extends one of MAKERS, and no name of another module gets another value."""
    modules = set()  # by the names in this file
    for node in nodes(path):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            of = getattr(node, "module", None)
            for alias in node.names:
                if (of or alias.name).split(".")[0] in MAY["lab"]:
                    modules.add(alias.asname or alias.name)
    for node in nodes(path):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
            assert not bases & MAKERS, f"class {node.name}"
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        for target in targets:
            if isinstance(target, ast.Attribute):
                assert ast.unparse(target.value) not in modules, ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            assert ast.unparse(node.args[0]) not in modules, ast.unparse(node)


# Runs `python coevolve.py FLAGS` several times in one process, since imports take most of the time.
MANY = """
import json, runpy, sys
for flags in json.loads(sys.argv[1]):
    sys.argv = ["coevolve.py", *flags.split()]
    runpy.run_path("coevolve.py", run_name="__main__")
print("loaded", *sorted({name.split(".")[0] for name in sys.modules}))
"""


def test_the_core_runs_to_its_result_in_an_empty_folder(tmp_path):
    for name in METHOD:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    for name in "engine", "common", "environments", "tiny":
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    common = ("--train-tasks 2 --eval-tasks 1 --sft-epochs 1 --max-new-tokens 16 --iterations 1 "
              "--dpo-epochs 1 ")
    runs = {"webshop-coevolve-s0": "--env webshop --rollouts 2",
            "intercodesql-eto-s0": "--env intercodesql --method eto"}
    clear = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [sys.executable, "-c", MANY, json.dumps([common + flags for flags in runs.values()])],
        cwd=tmp_path, env=clear | {"OMP_NUM_THREADS": "1"}, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    for name in runs:
        folder = tmp_path / "runs" / name
        result = done.stdout.split(f"runs/{name}: ")[1].split("s in all")[0]
        phases = json.loads((folder / "phases.json").read_text())
        assert "iter1/target-agent" in phases
        for phase, row in phases.items():
            assert (folder / phase).exists()
            assert f"\n{phase} " in f"\n{done.stdout}"
            if row["function"] == "evaluate":
                assert f"{row['reward']:.3f}" in result
    loaded = done.stdout.split("\nloaded ")[1].split()
    assert not {"lab", "evolve", "conftest", "pytest"} & {*loaded}
