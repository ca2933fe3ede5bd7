"""Several processes (gloo), with unsharded and sharded models, have the results of one process."""

import os
import time
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import (
    Toy,
    end_of_ranks,
    in_ranks,
    in_toy,
    make_model,
    make_tokenizer,
    refusal,
)
from family_models import tiny_model
from safetensors.torch import load_file
from test_dpo import VOCABULARY, group
from torch.distributed.fsdp import FSDPModule

import coevolve
import dpo
from common.files import read_jsonl
from engine import models, rollouts
from engine.chat import Encoder
from engine.forward_passes import average_and_clip, distributed_log_probs, fits_in_round
from engine.run import Run
from engine.tracking import flatten
from environments import environment
from envs import EnvError


def train(accelerator, folder, shard, precision="no"):
    """Trains on five batches. Two have one task, so that some ranks have no work."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    groups = [group(str(i), seed=i) for i in range(6)]
    ranks = accelerator.num_processes
    reads, read_model = [], models.read_model
    models.read_model = lambda *a, **how: reads.append(a) or read_model(*a, **how)
    if accelerator.is_main_process:
        model = make_model(VOCABULARY, seed=3, dtype=torch.bfloat16)
        model.config.tie_word_embeddings = True
        model.tie_weights()
        model.save_pretrained(folder / "base")
    accelerator.wait_for_everyone()
    if shard:  # as on GPUs
        prepare = models.prepare
        models.prepare = lambda model, recompute: (models.fuse_norms(model), prepare(model, recompute))
    model = models.load(accelerator, folder / "base", recompute=shard, shard=shard)
    parameters = [*model.parameters()]
    assert isinstance(model, FSDPModule) == shard
    assert {p.dtype for p in parameters} == {torch.float32}
    assert len(reads) == (accelerator.is_main_process or not shard)  # one rank reads for all
    if shard:  # 50 rows on 3 ranks are uneven
        held = sum(p.to_local().numel() for p in parameters)
        assert held * ranks < 1.3 * sum(p.numel() for p in parameters)
    dpo.add_references(model, groups, partial(distributed_log_probs, accelerator, tokens=0))
    steps = [[groups[int(i)] for i in batch] for batch in ("012", "3", "45", "501", "2")]
    log = dpo.train(model, dpo.adamw(model, 0.01), steps, dpo.learning_rates(5, 1e-3, 0.5, True),
                    partial(dpo.preference_loss, beta=0.1), dpo.pair_count,
                    partial(distributed_log_probs, accelerator, tokens=40),
                    fits=partial(fits_in_round, tokens=40, ranks=ranks), clip=average_and_clip)
    models.save(accelerator, model, Encoder(make_tokenizer("chatml")), folder / "after")
    return dict(log=[flatten("", line) for line in log],
                references=[t.ref_log_prob for t in dpo.trajectories_of(groups)])


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return in_ranks(1, train, folder, False), folder / "after"


@pytest.mark.parametrize("ranks, shard", [(2, False), (3, True)])
def test_unsharded_and_sharded_ranks_train_like_one_process(ranks, shard, one, tmp_path):
    """Sharded models also have gradient checkpointing and fused norms, as on GPUs."""
    expected, folder = one
    found = in_ranks(ranks, train, tmp_path, shard)
    again = models.read_model(tmp_path / "after")
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight
    assert found["references"] == pytest.approx(expected["references"], abs=1e-4)
    for a, b in zip(expected["log"], found["log"], strict=True):
        assert b["/loss"] == pytest.approx(a["/loss"], abs=1e-6, rel=1e-6)
        assert b["/norm"] == pytest.approx(a["/norm"], rel=1e-4)
        for name in a.keys() - {"/norm"}:
            if not name.endswith("accuracy"):  # before the first update, it counts signs of rounding
                assert b[name] == pytest.approx(a[name], abs=1e-3)
    of_one, of_ranks = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "after"))
    torch.testing.assert_close(of_ranks, of_one, atol=1e-5, rtol=0)
    assert "lm_head.weight" not in of_one  # tied weights are saved once


@pytest.mark.parametrize("ranks", [1, 2])
def test_forward_passes_in_bf16_train_fp32_weights(ranks, one, tmp_path):
    """The loss is that of fp32 up to rounding. Two ranks are sharded."""
    expected, _ = one
    found = in_ranks(ranks, train, tmp_path, ranks > 1, "bf16")
    assert found["references"] == pytest.approx(expected["references"], rel=0.03)
    assert found["references"] != expected["references"]
    # In both precisions the DPO loss of the first step is ln 2 times the mean weight.
    assert found["log"][0]["/dpo"] == pytest.approx(expected["log"][0]["/dpo"], abs=1e-3)


def equals_the_unsharded_one(accelerator, folder):
    """Checks on each rank the logits and the generation config of a sharded model."""
    model, whole = models.load_sharded(accelerator, folder, False), models.read_model(folder)
    assert model.generation_config.to_dict() == whole.generation_config.to_dict()
    logits = [each(input_ids=torch.tensor([[*range(5, 25)]])).logits for each in (model, whole)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["bart", "zamba"])
def test_a_sharded_model_equals_the_unsharded_one(family, tmp_path):
    """BART's config would force an end of text. Layers of Zamba share parameters."""
    tiny_model(family).save_pretrained(tmp_path)
    in_ranks(2, equals_the_unsharded_one, tmp_path)


# ----------------------------------------------------------------------------- the loop on ranks


@pytest.fixture
def start(small_model, tmp_path, monkeypatch):
    """start(ranks, *flags, env=environment) -> the exit statuses of the ranks of a run, and their
    output."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # of rank 1, before it prints an error
    said = tmp_path / "said"

    def run(ranks, *flags, env=Toy):
        said.unlink(missing_ok=True)
        flags = ("--model", small_model, "--out", tmp_path / "run", "--eval-tasks", 1, *flags)
        return end_of_ranks(ranks, lambda: in_toy(*flags, env=env), said), said.read_text()

    return run


ETO = ("--method", "eto", "--temperature", 2, "--rollouts", 2)


def test_two_ranks_run_the_core_like_one_process(start, tmp_path):
    """With one evaluated task, one of two ranks has no episodes."""
    for ranks in (2, 1):
        statuses, said = start(ranks, *ETO, "--out", tmp_path / str(ranks))
        assert statuses == [0] * ranks, said[-3000:]
        assert said.count("eto on webshop") == 1  # the first rank alone prints
    for name in ("experts", "iter1/target", "iter1/pairs-target", "eval-1-target-test",
                 "iter1/target-agent/train"):
        one, two = (read_jsonl(tmp_path / out / f"{name}.jsonl") for out in "12")
        for a, b in zip(one, two, strict=True):
            for rounded in "log_probs", "loss":
                assert a.pop(rounded, []) == pytest.approx(b.pop(rounded, []), abs=1e-4)
            assert a == b or name.endswith("train")  # whose other numbers are rounded, too
    # A resumed run may have another number of ranks.
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "2").rglob("*.safetensors")}
    assert start(1, *ETO, "--out", tmp_path / "2")[0] == [0]
    assert times == {p: p.stat().st_mtime_ns for p in times}


class Gone(Toy):
    """It breaks when the second rank plays evaluation tasks."""

    def reset(self, task):
        if os.environ["RANK"] == "1" and "-train-" not in task:
            raise EnvError("the shop of rank 1 is gone; start it again")
        return super().reset(task)


def test_an_error_on_one_rank_ends_all(start, tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "WAITS", ())
    statuses, said = start(2, *ETO, "--eval-tasks", 2, env=Gone)
    assert 0 not in statuses and "the shop of rank 1 is gone; start it again" in said
    assert (tmp_path / "run/sft-target").exists()
    assert not [*(tmp_path / "run").glob("eval-*.jsonl")]


DIFFER = ("the ranks differ in the phase, its inputs or its parameters; make the code between phases "
          "deterministic")


def differ(accelerator, model, folder):
    """Compares calls of `once` that depend on the rank. The ranks can agree after each of them."""
    rank = accelerator.process_index
    run = Run(coevolve.Settings(model=str(model), out=str(folder / "run")), environment("webshop")())

    def phase(run, *inputs, n=0):
        return [dict(text="a"), dict(text="b")]

    rows = run.once("rows.jsonl", phase)
    (folder / str(rank)).write_text(str(rank))
    once = partial(run.once, "a.jsonl", phase)
    swapped = [rows[rank], rows[1 - rank]]  # as by a shuffle without a seed
    assert refusal(once, swapped) == f"phase, for the output a.jsonl: {DIFFER}"
    for step in (lambda: once(n=rank), lambda: once(folder / str(rank)),
                 lambda: run.once(f"{rank}.jsonl", phase), lambda: once() if rank else run.close()):
        assert DIFFER in refusal(step)
    return [*map(dict, once(rows, n=1))]


def test_all_that_identifies_a_phase_is_compared(small_model, tmp_path):
    assert in_ranks(2, differ, small_model, tmp_path) == [dict(text="a"), dict(text="b")]
