"""A whole co-evolution run in the shop with a tiny random model of each of twelve families."""

import json
import math
import random

import pytest
import torch
import transformers
from family_models import tiny_model

import coevolve
import dpo
from worlds.files import read_jsonl

FAMILIES = ["llama", "qwen3", "qwen3_5_text", "qwen3_next", "gemma3_text", "gemma4_text", "gpt_oss",
            "lfm2", "falcon_h1", "granitemoehybrid", "mamba", "deepseek_v3"]
RUN = ("--env webshop --view short --train-tasks 4 --eval-splits validation --eval-tasks 2 "
       "--iterations 1 --sft-epochs 1 --dpo-epochs 1 --max-tokens 420 --max-new-tokens 6 "
       "--sft-lr 1e-3 --dpo-lr 1e-3 --dpo-warmup 0 --lambda-sft 0 --gradient-checkpointing on").split()


def weights(folder) -> torch.Tensor:
    return torch.cat([p.flatten() for p in dpo.read_model(folder).parameters()])


def sampled_log_probs(model, t: dpo.Trajectory, never, temperature: float) -> torch.Tensor:
    """Those of its action tokens, by transformers alone: one text, no mask, no cache."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([t.ids]), use_cache=False).logits[0, :-1]
    logits[:, list(never)] = -torch.inf
    found = (logits / temperature).log_softmax(-1)[range(len(t.ids) - 1), t.ids[1:]]
    return found[torch.tensor(t.action_mask[1:]) > 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_runs_the_whole_loop(family, tmp_path, capsys):
    base, out = tmp_path / "model", tmp_path / "run"
    tokenizer = transformers.AutoTokenizer.from_pretrained(coevolve.MODELS["tiny"])
    tiny_model(family, vocabulary=len(tokenizer)).save_pretrained(base)
    tokenizer.save_pretrained(base)
    coevolve.main([*RUN, "--model", str(base), "--out", str(out)])
    assert "iter1/target-agent" in json.loads((out / "phases.json").read_text())
    assert "eval-1-target-validation" in capsys.readouterr().out

    # What was played is what the agent's plain passes give, to rounding.
    agent = dpo.read_model(out / "sft-target").eval()
    never = dpo.Encoder(tokenizer).never(agent.config.get_text_config().vocab_size)
    played = coevolve.read(out / "iter1/target.jsonl")
    assert len(played) == 4
    for t in random.Random(0).sample(played, 2):
        expected = sampled_log_probs(agent, t, never, 0.7)
        assert (torch.tensor(t.log_probs) - expected).abs().max() < 1e-3

    # The first step of a preference phase finds policy and reference equal, so no dropout is left.
    steps = read_jsonl(out / "iter1/target-agent/train.jsonl")
    for kind, row in steps[0]["kinds"].items():
        assert kind.startswith("expert>") and abs(row["margin"]) < 1e-4
    assert math.isclose(steps[0]["loss"], math.log(2) / 2, rel_tol=1e-4)  # two pairs weigh 1
    # Each phase moves the weights that it was given.
    moved = [weights(out / name) for name in ("sft-target", "iter1/target-agent")]
    assert (weights(base) - moved[0]).abs().max() > 1e-4
    assert (moved[0] - moved[1]).abs().max() > 1e-4
