"""The house: which room imports which, what stands on the top level, how long it may get."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from lab.harness.files import ROOT

# room -> the rooms that it may import; nothing is imported upwards. All but worlds are of lab.
LOW = "worlds play_env tokens engine harness"
RUN = f"{LOW} training playing program"
MAY = {"worlds": "worlds", "engine": "engine", "play_env": "worlds", "tokens": "engine",
       "harness": LOW, "training": f"{LOW} training", "playing": f"{LOW} training playing",
       "program": RUN, "baselines": f"{RUN} baselines", "look": f"{RUN} look",
       "loop": f"{RUN} baselines look", "mutual": f"{RUN} loop",
       "pretrain": "pretrain worlds tokens engine",
       "study": f"{RUN} loop mutual look study"}
FILES = {"loop", "tokens", "play_env", "mutual"}
CORE = {"coevolve", "dpo", "envs", "evolve"}  # names of the top level, which lab does not import
OTHERS = ["tests", "bench"]  # which import what they like, and which nobody imports
TEXT_ONLY = {"torch", "transformers", "accelerate", "tokenizers", "safetensors"}


def files(room: str) -> list[Path]:
    folder = ROOT if room == "worlds" else ROOT / "lab"
    return [folder / f"{room}.py"] if room in FILES else sorted((folder / room).glob("**/*.py"))


def imported(path: Path) -> set[str]:
    """The first part of the name of all that a file imports, wherever in it; of lab, the room."""
    names = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not isinstance(node, ast.If)]  # the main program
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.removeprefix("lab.").split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}, line {node.lineno}: a relative import"
            names |= ({alias.name for alias in node.names} if node.module == "lab" else
                      {node.module.removeprefix("lab.").split(".")[0]})
    return names


@pytest.mark.parametrize("room", MAY)
def test_a_room_imports_only_the_rooms_below_it(room):
    assert files(room)
    for path in files(room):
        ours = imported(path) & {*MAY, *OTHERS, *CORE, "lab", "conftest"}
        assert ours <= set(MAY[room].split()), path
        if room == "worlds":
            assert not imported(path) & TEXT_ONLY, path


def test_the_method_is_short():
    assert {path.stem for path in (ROOT / "lab").glob("*.py")} == {*FILES, "__init__"}
    lines = {name: len((ROOT / f"lab/{name}.py").read_text(encoding="utf-8").splitlines())
             for name in ("loop", "tokens", "play_env")}
    assert sum(lines.values()) <= 900, lines


def test_every_room_is_a_package_of_the_list():
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == {"lab", "worlds"}
    packages = {path.parent.name for path in ROOT.glob("lab/*/__init__.py")}
    assert packages == {*MAY, "bench"} - FILES - {"worlds"}


@pytest.mark.parametrize("module", ["worlds.webshop", "lab.play_env"])
def test_the_shop_needs_nothing_that_other_environments_need(module):
    code = (f"import sys, {module}\n"
            "print(*({'py4j', 'scienceworld', 'requests', 'urllib3', 'pymysql', 'sqlite3', 'numpy',"
            " 'torch'} & set(sys.modules)))")
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, check=True,
                          capture_output=True).stdout
    assert told.split() == []
