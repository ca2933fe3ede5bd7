"""Several processes (gloo), with unsharded and sharded models, have the results of one process."""

import os
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import Toy, ended, fork_ranks, in_ranks, in_toy, make_model, make_tokenizer
from family_models import tiny_model
from safetensors.torch import load_file
from test_dpo import VOCABULARY, group, random_trajectories
from torch.distributed.fsdp import FSDPModule

import dpo
from common.files import read_jsonl
from engine import models, rollouts
from engine.chat import Encoder
from engine.forward_passes import average_and_clip, distributed_log_probs, fits_in_round
from envs import EnvError


def train(accelerator, folder, shard):
    """Trains on five batches. Two have one task, so that some ranks have no work."""
    groups = [group(str(i), seed=i) for i in range(6)]
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
    norms = sum(isinstance(module, models.FusedRMSNorm) for module in model.modules())
    assert norms == (4 * 2 + 1 if shard else 0)  # two layers of Qwen3
    assert isinstance(model, FSDPModule) == shard
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert len(reads) == (accelerator.is_main_process or not shard)  # one rank reads for all
    if shard:  # 50 rows on 3 ranks are uneven
        held = sum(p.to_local().numel() for p in model.parameters())
        assert held * accelerator.num_processes < 1.3 * sum(p.numel() for p in model.parameters())
    log_probs = partial(distributed_log_probs, accelerator, tokens=40)
    fits = partial(fits_in_round, tokens=40, ranks=accelerator.num_processes)
    dpo.add_references(model, groups, log_probs, fits)
    steps = [[groups[i] for i in batch] for batch in ([0, 1, 2], [3], [4, 5], [5, 0, 1], [2])]
    log = dpo.train(model, dpo.adamw(model, 0.01), steps, dpo.learning_rates(5, 1e-3, 0.5, True),
                    partial(dpo.preference_loss, beta=0.1), dpo.pair_count, log_probs, fits=fits,
                    clip=average_and_clip)
    plays = models.make_inference_copy(model, torch.float32)  # as evolve.py's agents do in training
    ids = torch.tensor([random_trajectories(9)[0].ids])
    moved = (plays(ids).logits - model(ids).logits).abs().max().item()
    models.save(accelerator, model, Encoder(make_tokenizer("chatml")), folder / "after")
    alone = distributed_log_probs(accelerator, model, random_trajectories(9, 30), 0).tolist()
    return dict(log=log, reference=[t.ref_log_prob for t in dpo.trajectories_of(groups)], alone=alone,
                moved=moved)


def trained(folder, ranks, shard):
    found = in_ranks(ranks, train, folder, shard)
    return found | dict(weights=load_file(folder / "after/model.safetensors"))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("one"), 1, False)


@pytest.mark.parametrize("ranks, shard", [(2, False), (3, True)])
def test_unsharded_and_sharded_ranks_train_like_one_process(ranks, shard, one, tmp_path):
    """Sharded models also have gradient checkpointing and fused norms, as on GPUs."""
    other = trained(tmp_path, ranks, shard)
    again = models.read_model(tmp_path / "after")
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight
    assert other["reference"] == pytest.approx(one["reference"], abs=1e-4)
    assert other["moved"] < 1e-5
    for a, b in zip(one["log"], other["log"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-6, rel=1e-6)
        assert b["norm"] == pytest.approx(a["norm"], rel=1e-4)
        for kind, row in a["kinds"].items():
            if abs(row["margin"]) < 1e-4:  # before the first update its sign is rounding
                row = row | dict(accuracy=b["kinds"][kind]["accuracy"])
            assert b["kinds"][kind] == pytest.approx(row, abs=1e-3)
    assert one["weights"].keys() == other["weights"].keys()
    for name, weights in one["weights"].items():
        torch.testing.assert_close(other["weights"][name], weights, atol=1e-5, rtol=0)
    assert other["alone"] == pytest.approx(one["alone"], abs=1e-3)
    assert "lm_head.weight" not in one["weights"]  # tied weights are saved once


def load_sharded(accelerator, folder, family):
    """Returns the generation config of a sharded model on each rank, and the error of its logits."""
    model = models.load_sharded(accelerator, folder / family, recompute=False)
    known = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(known, model.generation_config.to_dict())
    whole = models.read_model(folder / family)
    ids = torch.tensor([[*range(5, 25)]])
    off = (model(input_ids=ids).logits - whole(input_ids=ids).logits).abs().max().item()
    return dict(known=known, whole=whole.generation_config.to_dict(), off=off)


@pytest.mark.parametrize("family", ["bart", "zamba"])
def test_a_sharded_model_equals_the_unsharded_one(family, tmp_path):
    """BART's config would force an end of text. Layers of Zamba share parameters."""
    tiny_model(family).save_pretrained(tmp_path / family)
    found = in_ranks(2, load_sharded, tmp_path, family)
    assert found["known"] == [found["whole"]] * 2
    assert found["off"] < 1e-4


def start(ranks, said, env, *flags):
    """Returns the exit statuses of the ranks of a run in an environment."""
    def work():
        in_toy("--method", "eto", "--temperature", 2, "--rollouts", 2, *flags, env=env)

    said.unlink(missing_ok=True)
    return [ended(process) for process in fork_ranks(ranks, work, said)]


def test_two_ranks_run_the_core_like_one_process(small_model, tmp_path):
    """With one evaluated task, one of two ranks has no episodes."""
    said = tmp_path / "said"
    for ranks in (2, 1):
        flags = ("--model", small_model, "--eval-tasks", 1, "--out", tmp_path / str(ranks))
        assert start(ranks, said, Toy, *flags) == [0] * ranks, said.read_text()[-3000:]
        assert said.read_text().count("eto on webshop") == 1  # the first rank alone prints

    def both(name):
        return zip(*[read_jsonl(tmp_path / out / name) for out in "12"], strict=True)

    for name in ("experts.jsonl", "iter1/target.jsonl", "iter1/pairs-target.jsonl",
                 "eval-1-target-test.jsonl"):
        for a, b in both(name):
            assert a.pop("log_probs", []) == pytest.approx(b.pop("log_probs", []), abs=1e-4)
            assert a == b
    for agent in "sft-target", "iter1/target-agent":
        for a, b in both(f"{agent}/train.jsonl"):
            assert b["loss"] == pytest.approx(a["loss"], abs=1e-4)
    # A resumed run may have another number of ranks.
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "2").rglob("*.safetensors")}
    assert start(1, said, Toy, *flags[:-1], tmp_path / "2") == [0]
    assert times == {p: p.stat().st_mtime_ns for p in times}


class Gone(Toy):
    """It breaks when the second rank plays evaluation tasks."""

    def reset(self, task):
        if os.environ["RANK"] == "1" and "-train-" not in task:
            raise EnvError("the shop of rank 1 is gone; start it again")
        return super().reset(task)


def test_an_error_on_one_rank_ends_all(small_model, tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "WAITS", ())
    out, said = tmp_path / "run", tmp_path / "said"
    assert 0 not in start(2, said, Gone, "--model", small_model, "--out", out)
    assert "the shop of rank 1 is gone; start it again" in said.read_text()
    assert (out / "sft-target").exists() and not [*out.glob("eval-*.jsonl")]


def bf16(accelerator, folder, shard):
    """Trains one step at a learning rate of 1e-6. Returns the loss and the references per precision."""
    results = {}
    for precision in ("no", "bf16"):
        AcceleratorState._reset_state(accelerator is None)
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        model = models.load(accelerator, folder, False, shard)
        seen = set()
        model.get_output_embeddings().register_forward_hook(
            lambda module, inputs, output: seen.add(output.dtype))
        before = unsharded(model)
        groups = [group(str(i), seed=i) for i in range(3)]
        log_probs = partial(distributed_log_probs, accelerator, tokens=1000)
        dpo.add_references(model, groups, log_probs)
        loss = partial(dpo.preference_loss, beta=0.1, lambda_sft=0.0)
        [line] = dpo.train(model, dpo.adamw(model), [groups], [1e-6], loss, dpo.pair_count,
                           log_probs, clip=average_and_clip)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert seen == {torch.float32 if precision == "no" else torch.bfloat16}
        for name, p in unsharded(model).items():
            if ".layers." in name and p.ndim == 2:
                assert (p != before[name]).float().mean() > 0.99, name
        results[precision] = line["loss"], [t.ref_log_prob for t in dpo.trajectories_of(groups)]
    return results


def unsharded(model):
    """Returns a copy of each parameter by name, unsharded."""
    return {name: getattr(p, "full_tensor", p.clone)().detach().clone()
            for name, p in model.named_parameters()}


@pytest.mark.parametrize("shard", [False, True])
def test_bf16_forward_passes_change_fp32_weights(shard, tmp_path):
    """The loss is that of fp32 up to rounding, and nearly all weights change."""
    make_model(VOCABULARY, seed=3, dtype=torch.float32).save_pretrained(tmp_path)
    results = in_ranks(2, bf16, tmp_path, shard) if shard else bf16(None, tmp_path, shard)
    (plain, references), (half, in_bf16) = results["no"], results["bf16"]
    assert in_bf16 == pytest.approx(references, rel=0.03) and in_bf16 != references
    # In both precisions the loss of the first step is ln 2 times the mean weight.
    assert half == pytest.approx(plain, abs=1e-5)
