"""Several processes, weights whole or sharded (gloo), train like one; stopped ones go on."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import adamw, in_ranks, make_model
from test_dpo import VOCABULARY, group
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from lab import tokens as dpo
from lab.engine import sharding
from lab.engine.checkpoint import Checkpoint, appear
from lab.harness.files import ROOT


class Stopped(Exception):
    pass


def train(accelerator, folder, shard, name, stop=0):
    """Trains on five batches, of which the second has one instruction: the other ranks have nothing
    to do. With `stop` it is stopped after so many steps and continued; "tied": embeddings are.
    """
    ranks, log = accelerator.num_processes, []
    groups = [group(str(i), seed=i) for i in range(6)]
    epochs = [[[groups[i] for i in batch] for batch in epoch]
              for epoch in ([[0, 1, 2], [3], [4, 5]], [[5, 0, 1], [2]])]
    model = make_model(VOCABULARY, seed=3)
    if name == "tied":
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model = sharding.shard_model(accelerator, model, shard, recompute=shard)
    assert isinstance(model, FSDPModule) == shard
    assert isinstance(model, DistributedDataParallel) == (not shard and ranks > 1)
    if shard:
        local = sum(p.to_local().numel() for p in model.parameters())
        assert local * int(os.environ.get("LOCAL_WORLD_SIZE", 1)) < 1.3 * sum(p.numel() for p in model.parameters())
    for g, found in zip(groups, dpo.log_probs_of(accelerator, model, groups, 40)):
        g.reference = found

    def note(event):
        log.append(event)
        if event["step"] == stop + 1 and stop:
            raise Stopped  # the step's own checkpoint is not written any more

    checkpoint = Checkpoint(accelerator, folder / "checkpoint", "phase", 0)
    try:
        loss = partial(dpo.preference_loss, beta=0.1, lambda_sft=0.1)
        dpo.fit(accelerator, model, epochs, dpo.Objective(loss, dpo.count_pairs),
                adamw(warmup=0.5, schedule="cosine", weight_decay=0.01, tokens_per_forward=40),
                note, checkpoint)
    except Stopped:
        assert [p.name for p in (folder / "checkpoint").iterdir()] == [f"step-{stop}"]
        accelerator.wait_for_everyone()
        return train(accelerator, folder, shard, name)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:  # as a finished phase does
        shutil.rmtree(folder / "checkpoint")
    sharding.save(accelerator, model, folder / name)
    for event in log:
        del event["tokens_per_second"]
    return dict(log=log, reference=[g.reference for g in groups])


def trainings(accelerator, folder, shard):
    return dict(whole=train(accelerator, folder, shard, "whole"),
                after1=train(accelerator, folder, shard, "after1", stop=1),
                after3=train(accelerator, folder, shard, "after3", stop=3),
                tied=train(accelerator, folder, shard, "tied"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(ranks, shard): name -> log, reference and saved weights of each of `trainings`."""
    done = {}

    def once(ranks, shard):
        if (ranks, shard) not in done:
            folder = tmp_path_factory.mktemp("run")
            results = in_ranks(ranks, trainings, folder, shard)
            for name in results:
                model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
                results[name]["weights"] = model.state_dict()
            done[ranks, shard] = results
        return done[ranks, shard]

    return once


WAYS = pytest.mark.parametrize("ranks, shard", [(1, False), (2, False), (1, True), (2, True),
                                                (3, True)])


@WAYS
@pytest.mark.parametrize("name", ["whole", "tied"])
def test_ranks_whole_or_sharded_equal_one_process(run, ranks, shard, name):
    """50 rows of the vocabulary on 3 ranks make uneven shards; shards also recompute layers."""
    one, other = run(1, False)[name], run(ranks, shard)[name]
    for a, b in zip(one["reference"], other["reference"], strict=True):
        assert b == pytest.approx(a, abs=1e-9)
    assert [e["step"] for e in one["log"]] == [1, 2, 3, 4, 5]
    for a, b in zip(one["log"], other["log"], strict=True):
        assert (a["step"], a["epoch"], a["lr"]) == (b["step"], b["epoch"], b["lr"])
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-10)
        assert b["gradient_norm"] == pytest.approx(a["gradient_norm"], abs=1e-9)
        assert b["kinds"].keys() == a["kinds"].keys()
        for kind, row in a["kinds"].items():
            if abs(row["margin"]) < 1e-9:  # before the first update its sign is rounding
                row = row | dict(accuracy=b["kinds"][kind]["accuracy"])
            assert b["kinds"][kind] == pytest.approx(row, abs=1e-9)
    assert one["weights"].keys() == other["weights"].keys()
    for parameter, weights in one["weights"].items():
        torch.testing.assert_close(other["weights"][parameter], weights, atol=1e-9, rtol=0)
    head, embedding = (other["weights"][p] for p in ("lm_head.weight", "model.embed_tokens.weight"))
    assert torch.equal(head, embedding) == (name == "tied")


@WAYS
@pytest.mark.parametrize("stopped", ["after1", "after3"])
def test_a_phase_that_was_stopped_goes_on_to_the_same_bits(run, ranks, shard, stopped):
    whole, again = run(ranks, shard)["whole"], run(ranks, shard)[stopped]
    assert again["log"] == whole["log"] and again["reference"] == whole["reference"]
    for parameter, weights in whole["weights"].items():
        assert torch.equal(again["weights"][parameter], weights)


def on_machines(accelerator, folder, of_each):
    os.environ["LOCAL_WORLD_SIZE"] = str(of_each)
    return train(accelerator, folder, True, f"of-{of_each}", stop=3)


def test_two_machines_of_two_equal_one_of_four(tmp_path):
    """Sharded inside a machine and replicated between them; stopped and continued, too."""
    one, two = (in_ranks(4, on_machines, tmp_path, of_each) for of_each in (4, 2))
    for a, b in zip(one["log"], two["log"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-10)
        assert b["gradient_norm"] == pytest.approx(a["gradient_norm"], abs=1e-9)
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / f"of-{n}", dtype=torch.float64)
                     .state_dict() for n in (4, 2))
    for parameter, weights in first.items():
        torch.testing.assert_close(second[parameter], weights, atol=1e-9, rtol=0)


def test_torchrun_starts_a_run(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
         "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", ROOT / "lab/loop.py", "--env",
         "webshop", "--method", "evaluate", "--eval-tasks", "2", "--eval-splits", "test",
         "--threads", "1", "--out", tmp_path / "run"],
        capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 processes on cpu" in done.stdout and (tmp_path / "run/result.json").exists()


def test_a_file_that_a_shared_folder_shows_late_is_waited_for(tmp_path, monkeypatch):
    """NFS remembers "no such file" for a while, and then is asked again."""
    file, clock = tmp_path / "made", []
    monkeypatch.setattr("time.sleep", clock.append)
    monkeypatch.setattr(Path, "exists", lambda path: sum(clock) >= 60)
    appear(file)
    assert sum(clock) == 60
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(OSError, match="--out on a disk that all machines share") as error:
        appear(file)
    assert error.value.filename == str(file)


@pytest.mark.parametrize("shard", [False, True])
def test_passes_in_bf16_move_fp32_weights(shard):
    """At lr 1e-6 bf16 weights would stay as they are; losses agree with fp32 to bf16's rounding."""
    losses = {}
    for precision in ("no", "bf16"):
        AcceleratorState._reset_state(True)
        accelerator, log = Accelerator(cpu=True, mixed_precision=precision), []
        model = make_model(VOCABULARY, seed=3, dtype=torch.float32)
        before = {name: p.clone() for name, p in model.state_dict().items()}
        model = sharding.shard_model(accelerator, model, shard)
        assert sharding.dtypes(accelerator, model) == dict(
            weights="float32", gradients="float32", moments="float32",
            compute="float32" if precision == "no" else "bfloat16")
        groups, seen = [group(str(i), seed=i) for i in range(3)], set()
        for g, found in zip(groups, dpo.log_probs_of(accelerator, model, groups, 1000)):
            g.reference = found
        head = model.get_output_embeddings()
        head.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
        loss = partial(dpo.preference_loss, beta=0.1)
        dpo.fit(accelerator, model, [[groups]], dpo.Objective(loss, dpo.count_pairs),
                adamw(lr=1e-6), log.append)
        assert seen == {torch.float32 if precision == "no" else torch.bfloat16}
        after = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        for name in before:
            assert after[name].dtype == torch.float32
            if ".layers." in name and before[name].ndim == 2:
                assert (after[name] != before[name]).float().mean() > 0.99, name
        losses[precision] = log[0]["loss"], [r for g in groups for r in g.reference]
    AcceleratorState._reset_state(True)
    assert losses["bf16"][1] == pytest.approx(losses["no"][1], rel=0.03)
    assert losses["bf16"][1] != losses["no"][1]
    # The first step's loss is ln 2 times the mean weight in either: the same arithmetic twice.
    assert losses["bf16"][0] == pytest.approx(losses["no"][0], abs=1e-6)


def test_weights_of_16_bits_are_refused():
    model = make_model(VOCABULARY, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="embed_tokens.weight is torch.bfloat16; load the model"):
        sharding.shard_model(Accelerator(cpu=True), model, shard=False)


def saved(folder):
    """(model, optimizer, checkpoint), the state after one step in the folder."""
    accelerator = Accelerator(cpu=True)
    model = sharding.shard_model(accelerator, make_model(VOCABULARY), shard=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    dpo.sft_loss(model, [group()])[0].backward()
    optimizer.step()
    checkpoint = Checkpoint(accelerator, folder, "sft from these experts", 0)
    checkpoint.save(model, optimizer, 1, [{"step": 1}])
    return model, optimizer, checkpoint


def test_a_state_of_another_phase_or_number_of_ranks_is_not_used(tmp_path):
    model, optimizer, state = saved(tmp_path)
    state.save(model, optimizer, 2, [{"step": 1}, {"step": 2}])
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]  # the newest alone
    steps, events = state.restore(model, torch.optim.AdamW(model.parameters(), fused=True))
    assert steps == len(events) == state.resumed_at == 2
    other = Checkpoint(state.accelerator, tmp_path, "sft from those experts", 0)
    assert other.restore(model, optimizer) == (0, [])
    other.save(model, optimizer, 2, [{"step": 1}, {"step": 2}])  # takes the unused one's place
    assert other.restore(model, optimizer)[0] == 2 and state.restore(model, optimizer) == (0, [])
    shards = sharding.shard_model(state.accelerator, make_model(VOCABULARY), shard=True)
    assert state.restore(shards, torch.optim.AdamW(shards.parameters())) == (0, [])


def test_a_state_is_on_the_disk_before_it_counts_and_the_one_before_goes(tmp_path, monkeypatch):
    model, optimizer, checkpoint = saved(tmp_path)
    done, fsync, rename = [], os.fsync, Path.rename
    name = lambda number: Path(os.readlink(f"/proc/self/fd/{number}")).name
    monkeypatch.setattr(os, "fsync", lambda n: (done.append(name(n)), fsync(n)))
    monkeypatch.setattr(Path, "rename", lambda self, to: (done.append(to.name), rename(self, to)))
    monkeypatch.setattr("shutil.rmtree", lambda path, **_: done.append(f"without {path.name}"))
    checkpoint.save(model, optimizer, 2, [{"step": 1}, {"step": 2}])
    assert done == ["without writing", "whole.pt", "without step-2", "writing", "step-2",
                    tmp_path.name, "without step-1"]


def test_a_state_that_takes_long_to_write_is_written_less_often(tmp_path, monkeypatch):
    """After 5 minutes; once writing took 30 s, 5% of 10 minutes, after 10."""
    model, optimizer, checkpoint = saved(tmp_path)
    assert checkpoint.due()  # of 0 minutes: after every step
    clock, write = [0.0], torch.save
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(torch, "save", lambda *a: (clock.append(clock.pop() + 30), write(*a)))
    checkpoint = Checkpoint(checkpoint.accelerator, tmp_path, "sft", 5)
    for seconds, due in ((0, False), (299, False), (300, True)):
        clock[0] = seconds
        assert checkpoint.due() == due
    checkpoint.save(model, optimizer, 2, [])
    for seconds, due in ((330, False), (630, False), (929, False), (930, True)):
        clock[0] = seconds
        assert checkpoint.due() == due
