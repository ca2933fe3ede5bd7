"""Two processes (DDP over gloo) train like one, also when one of them has nothing to do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import json, sys
from functools import partial
sys.path[:0] = [{tests!r}, {root!r}]
import torch
from accelerate import Accelerator
from conftest import make_model
from test_dpo import VOCABULARY, group
import dpo

accelerator, log = Accelerator(cpu=True), []
assert accelerator.num_processes == {world}
epochs = [[[group(str(i), seed=i) for i in batch] for batch in ([0, 1, 2], [3], [4, 5])]]
model = dpo.fit(accelerator, make_model(VOCABULARY, seed=3), epochs,
                partial(dpo.preference_objective, beta=0.1, lambda_sft=0.1),
                lambda batch: sum(len(g.pairs) for g in batch), lr=1e-3, warmup=0.0,
                schedule="constant", weight_decay=0.0, max_grad_norm=1.0, tokens_per_forward=40,
                log=log.append)
if accelerator.is_main_process:
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    print(json.dumps(dict(log=log, weights=weights.tolist())))
"""


def run(world):
    tests = Path(__file__).parent
    code = WORKER.format(tests=str(tests), root=str(tests.parent), world=world)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world),
              "--no_python", sys.executable] if world > 1 else []
    done = subprocess.run([sys.executable, *launch, "-c", code], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_two_processes_equal_one():
    """Batches of 3, 1 and 2 instructions: the second leaves the second process idle."""
    one, two = run(1), run(2)
    assert two["weights"] == pytest.approx(one["weights"], abs=1e-9)
    for a, b in zip(one["log"], two["log"]):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-10)
        assert b["gradient_norm"] == pytest.approx(a["gradient_norm"], abs=1e-9)
        assert b["kinds"].keys() == a["kinds"].keys()
        for kind in a["kinds"]:
            assert b["kinds"][kind] == pytest.approx(a["kinds"][kind], abs=1e-9)
