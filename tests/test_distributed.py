"""Several processes (gloo), whole models or sharded ones, do what one does."""

import json
import os
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import ended, fork_ranks, in_ranks, make_model, make_tokenizer
from family_models import tiny_model
from safetensors.torch import load_file
from test_dpo import LOSS, VOCABULARY, group, random_trajectories
from torch.distributed.fsdp import FSDPModule

import coevolve
import dpo
import envs
from dpo import Objective
from worlds.webshop.shop import WebShop


def train(accelerator, folder, shard):
    """Five batches, of which two are of one instruction: there some ranks have nothing to do."""
    groups = [group(str(i), seed=i) for i in range(6)]
    reads, read_model = [], dpo.read_model
    dpo.read_model = lambda *a, **how: reads.append(a) or read_model(*a, **how)
    if accelerator.is_main_process:
        model = make_model(VOCABULARY, seed=3, dtype=torch.bfloat16)
        model.config.tie_word_embeddings = True
        model.tie_weights()
        model.save_pretrained(folder / "base")
    accelerator.wait_for_everyone()
    model = dpo.load(accelerator, folder / "base", recompute=shard, shard=shard)
    assert isinstance(model, FSDPModule) == shard
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert len(reads) == (accelerator.is_main_process or not shard)  # one reads for all
    if shard:  # a rank holds its part; 50 rows on 3 ranks are uneven
        held = sum(p.to_local().numel() for p in model.parameters())
        assert held * accelerator.num_processes < 1.3 * sum(p.numel() for p in model.parameters())
    log_probs = partial(dpo.log_probs_in_passes, accelerator, tokens=40)
    dpo.add_references(model, groups, log_probs, 120)
    steps = [[groups[i] for i in batch] for batch in ([0, 1, 2], [3], [4, 5], [5, 0, 1], [2])]
    objective = Objective(partial(dpo.preference_loss, s=LOSS), lambda g: len(g.pairs), 1e-3, 0.5,
                          "cosine", 0.01, tokens=60)
    log = list(dpo.training(model, dpo.adamw(model, objective), steps, objective, log_probs))
    dpo.save(accelerator, model, dpo.Encoder(make_tokenizer("chatml")), folder / "after")
    found = dpo.log_probs_in_passes(accelerator, model, random_trajectories(9, 30), 0).tolist()
    return dict(log=log, reference=[g.reference for g in groups], alone=found)


def trained(folder, ranks, shard):
    found = in_ranks(ranks, train, folder, shard)
    return found | dict(weights=load_file(folder / "after/model.safetensors"))


@pytest.mark.parametrize("ranks, shard", [(2, False), (3, True)])
def test_ranks_whole_or_sharded_train_like_one_process(ranks, shard, tmp_path_factory):
    """Shards also recompute their layers, as they do on GPUs."""
    one, other = (trained(tmp_path_factory.mktemp("run"), *how)
                  for how in ((1, False), (ranks, shard)))
    for a, b in zip(one["reference"], other["reference"], strict=True):
        assert b == pytest.approx(a, abs=1e-4)
    assert [e["step"] for e in one["log"]] == [1, 2, 3, 4, 5]
    for a, b in zip(one["log"], other["log"], strict=True):
        assert (a["step"], a["lr"]) == (b["step"], b["lr"])
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-6, rel=1e-6)
        assert b["norm"] == pytest.approx(a["norm"], rel=1e-4)
        assert b["kinds"].keys() == a["kinds"].keys()
        for kind, row in a["kinds"].items():
            if abs(row["margin"]) < 1e-4:  # before the first update its sign is rounding
                row = row | dict(accuracy=b["kinds"][kind]["accuracy"])
            assert b["kinds"][kind] == pytest.approx(row, abs=1e-3)
    assert one["weights"].keys() == other["weights"].keys()
    for name, weights in one["weights"].items():
        torch.testing.assert_close(other["weights"][name], weights, atol=1e-5, rtol=0)
    assert other["alone"] == pytest.approx(one["alone"], abs=1e-3)
    assert "lm_head.weight" not in one["weights"]  # tied, so that it is not there twice


def in_parts(accelerator, folder, family):
    """What each rank knows of how a model in parts ends texts; and a pass over a text by it."""
    model = dpo.load_in_parts(accelerator, folder / family, recompute=False)
    known = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(known, model.generation_config.to_dict())
    whole = dpo.read_model(folder / family)
    ids = torch.tensor([[*range(5, 25)]])
    off = (model(input_ids=ids).logits - whole(input_ids=ids).logits).abs().max().item()
    return dict(known=known, whole=whole.generation_config.to_dict(), off=off)


@pytest.mark.parametrize("family", ["bart", "zamba", "llama"])
def test_a_model_in_parts_is_the_whole_one_on_each_rank(family, tmp_path):
    """BART's config would force an end of text; layers of Zamba share parameters."""
    tiny_model(family).save_pretrained(tmp_path / family)
    found = in_ranks(2, in_parts, tmp_path, family)
    assert found["known"] == [found["whole"]] * 2
    assert found["off"] < 1e-4


RUN = ("--env webshop --method eto --train-tasks 6 --eval-tasks 1 --eval-splits validation --temperature 1.5 "
       "--sft-epochs 2 --iterations 1 --rollouts 2 --dpo-epochs 2 --sft-lr 1e-3").split()


def test_two_ranks_run_the_core_like_one_process(tmp_path):
    """Two ranks, one evaluated task: one rank has no share of the episodes."""
    def go(ranks, out):
        said, main = tmp_path / f"{ranks}.said", partial(coevolve.main, [*RUN, "--out",
                                                                       str(tmp_path / out)])
        said.unlink(missing_ok=True)
        codes = [ended(process) for process in fork_ranks(ranks, main, said)]
        assert codes == [0] * ranks, said.read_text()[-3000:]
        assert said.read_text().count("eto on webshop") == 1  # the first rank alone prints

    go(2, "two"), go(1, "one")
    rows = lambda run, name: [json.loads(row) for row in (tmp_path / run / name).open()]
    for name in ("experts.jsonl", "iter1/target.jsonl", "iter1/pairs-target.jsonl",
                 "eval-1-target-validation.jsonl"):
        for a, b in zip(rows("one", name), rows("two", name), strict=True):
            assert a.pop("log_probs", []) == pytest.approx(b.pop("log_probs", []), abs=1e-4)
            assert a == b
    for agent in "sft-target", "iter1/target-agent":
        for a, b in zip(rows("one", f"{agent}/train.jsonl"), rows("two", f"{agent}/train.jsonl"),
                        strict=True):
            assert b["loss"] == pytest.approx(a["loss"], abs=1e-4)
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "two").rglob("*.safetensors")}
    go(1, "two")  # the number of ranks is free to change
    assert times == {p: p.stat().st_mtime_ns for p in times}


def test_an_error_on_one_rank_ends_all(tmp_path, monkeypatch):
    reset, out = WebShop.reset, tmp_path / "run"

    def gone(self, task):
        if os.environ["RANK"] == "1" and "-train-" not in task:
            raise envs.EnvError("the shop of rank 1 is gone; start it again")
        return reset(self, task)

    monkeypatch.setattr(envs, "WAITS", ())
    monkeypatch.setattr(WebShop, "reset", gone)
    started = fork_ranks(2, partial(coevolve.main, [*RUN, "--eval-tasks", "4", "--out", str(out)]),
                         tmp_path / "said")
    assert 0 not in [ended(process) for process in started]
    assert "coevolve.py: the shop of rank 1 is gone; start it again" in (
        tmp_path / "said").read_text()
    assert (out / "sft-target").exists() and not [*out.glob("eval-*.jsonl")]


@pytest.mark.parametrize("shard", [False, True])
def test_passes_in_bf16_move_fp32_weights(shard, tmp_path):
    """Losses agree with fp32 to bf16's rounding; at lr 1e-6 nearly all of the weights move."""
    found = in_ranks(2, bf16, tmp_path, shard) if shard else bf16(None, tmp_path, shard)
    (plain, references), (half, in_bf16) = found["no"], found["bf16"]
    assert in_bf16 == pytest.approx(references, rel=0.03) and in_bf16 != references
    # The first step's loss is ln 2 times the mean weight in either: the same arithmetic twice.
    assert half == pytest.approx(plain, abs=1e-5)


def bf16(accelerator, folder, shard):
    found = {}
    for precision in ("no", "bf16"):
        AcceleratorState._reset_state(accelerator is None)
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        if accelerator.is_main_process and not (folder / "config.json").exists():
            make_model(VOCABULARY, seed=3, dtype=torch.float32).save_pretrained(folder)
        accelerator.wait_for_everyone()
        model = dpo.load(accelerator, folder, False, shard)
        seen = set()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        whole = lambda: {n: getattr(p, "full_tensor", p.clone)() for n, p in model.named_parameters()}
        before = {name: p.detach().clone() for name, p in whole().items()}
        model.get_output_embeddings().register_forward_hook(
            lambda module, inputs, output: seen.add(output.dtype))
        groups, log_probs = [group(str(i), seed=i) for i in range(3)], partial(
            dpo.log_probs_in_passes, accelerator, tokens=1000)
        dpo.add_references(model, groups, log_probs, 1000)
        objective = Objective(partial(dpo.preference_loss, s=LOSS), lambda g: 3, 1e-6, tokens=1000)
        LOSS.lambda_sft = 0.0
        optimizer = dpo.adamw(model, objective)
        log = list(dpo.training(model, optimizer, [groups], objective, log_probs))
        LOSS.lambda_sft = 0.1
        assert seen == {torch.float32 if precision == "no" else torch.bfloat16}
        for name, p in whole().items():
            if ".layers." in name and p.ndim == 2:
                assert (p != before[name]).float().mean() > 0.99, name
        found[precision] = log[0]["loss"], [r for g in groups for r in g.reference]
    return found
