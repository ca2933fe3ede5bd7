"""Every family of causal language models of text that transformers can build small, on the core.

`FAMILIES=all bash run.sh test tests/test_families.py` tries all; else it is a selection with every
kind of layer, of positions and of faults.
"""

import json
import math
import os
import random
import re
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import transformers
from conftest import plain_log_probs
from family_models import CLASSES, MUSIC, default, tiny_model

import coevolve
import dpo
from common.files import read_jsonl

DOCS = (Path(__file__).parent.parent / "docs" / "large_models.md").read_text(encoding="utf-8")
# Families that train and play a text, and families of a whole run.
SOME = ("bart bloom blt cpmant emu3 gemma2 gpt2 lfm2 llama4_text mamba minimax mixtral moshi nemotron_h "
        "phi3 qwen3_5_text reformer roberta rwkv stablelm xlnet").split()
RUNS = ("deepseek_v3 falcon_h1 gpt_oss gemma3_text gemma4_text granitemoehybrid lfm2 llama mamba "
        "qwen3 qwen3_5_text qwen3_next").split()[:12 if os.environ.get("FAMILIES") == "all" else 3]
LONGEST = 48  # tokens of a text: three of the models' windows
WAYS = {  # of passes and of replies -> the heading in docs/large_models.md
    (False, False, True): "side by side with a cache",
    (False, True, True): "replies one at a time",
    (False, False, False): "replies without a cache",
    (False, True, False): "replies one at a time, without a cache"}


def every() -> list[str]:
    """Others are another family's classes, or load as the text model of another family."""
    kinds = {name: default(name).model_type for name in CLASSES if name not in MUSIC}
    return [name for name, kind in kinds.items() if kind == name or kind not in CLASSES]


@pytest.fixture(scope="module")
def encoder():
    return dpo.Encoder(dpo.read(transformers.AutoTokenizer, coevolve.MODELS["tiny"]))


def outcome(family: str, folder, encoder) -> tuple[str, torch.nn.Module | None]:
    """The heading under which docs/large_models.md has to list it; and the model, as it is read
    again after it was saved."""
    tiny_model(family, vocabulary=len(encoder.tokenizer)).save_pretrained(folder)
    try:
        model = dpo.read_model(folder).eval()
        return WAYS[dpo.trial(model, encoder, LONGEST)], model
    except dpo.Unusable:
        return "refused", None


def distributions(model, ids: list[int]) -> torch.Tensor:
    """log pi of every next token, (l - 1, V), by transformers alone: one text, no cache."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)


def texts(encoder) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(4, len(encoder.tokenizer)) for _ in range(n)] for n in (30, 19, 9)]


def gradient(model, log_probs: torch.Tensor) -> torch.Tensor:
    """Of a weighted sum, with respect to all parameters."""
    model.zero_grad()
    (log_probs * torch.linspace(-1, 2, len(log_probs))).sum().backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                      for p in model.parameters()])


def assert_passes_are_right(model, encoder):
    """Log-probabilities of a padded pass, and their gradient, whose layers run again."""
    rng = random.Random(4)
    sequences = [dpo.Trajectory(ids=ids, action_mask=[0] + [int(rng.random() < 0.5) for _ in ids[1:]])
                 for ids in texts(encoder)]
    expected = torch.cat([plain_log_probs(model, t.ids, t.action_mask) for t in sequences])
    wanted = gradient(model, expected)
    padded = dpo.token_log_probs(dpo.prepare(model, recompute=True), sequences)
    assert (padded - expected).abs().max() < 1e-4
    assert (gradient(model, padded) - wanted).norm() < 1e-4 * wanted.norm()


def assert_replies_are_right(model, encoder, alone: bool, cache: bool):
    """Greedy replies in a batch are those alone, of the row that is padded; each token is the most
    probable one of a plain pass over the whole text."""
    never = encoder.sampler().never

    def replies(asked):
        return [ids for ids, _ in dpo.replies(model, encoder, dpo.Sampler(0.0, never), 5, (), [
            (ids, random.Random(0)) for ids in asked], alone, cache)]

    asked = texts(encoder)[:2]
    together = replies(asked)
    assert together[1:] == replies(asked[1:])
    for ids, new in zip(asked, together):
        plain = distributions(model, ids + new)[len(ids) - 1:].detach()
        plain[:, list(never)] = -torch.inf
        assert (plain.amax(-1) - plain[range(len(new)), new]).max() < 1e-4


def listed() -> dict[str, str]:
    """family -> the heading under which docs/large_models.md lists it, if not the usual one."""
    return {family: heading for heading, families in
            re.findall(r"^- \*\*(.+?)\*\*.*?: (.+)$", DOCS, re.MULTILINE)
            for family in re.findall("`(.+?)`", families)}


@pytest.mark.parametrize("family", every() if os.environ.get("FAMILIES") == "all" else SOME)
def test_a_family_trains_and_plays_as_it_reads_a_text_alone_or_is_refused(
        family, encoder, tmp_path):
    found, model = outcome(family, tmp_path, encoder)
    if f"transformers {transformers.__version__}" in DOCS:
        wanted = listed().get(family, WAYS[False, False, True])
        wanted = wanted.partition(":")[0]  # behind it stands a reason
        assert wanted == found, "python tests/test_families.py prints the lists"
    for (passes, alone, cache), heading in WAYS.items():
        if heading == found:
            assert not passes
            assert_replies_are_right(model, encoder, alone, cache)
            assert_passes_are_right(model, encoder)


def test_the_document_counts_every_family():
    if f"transformers {transformers.__version__}" in DOCS:
        assert f"all {len(every())} families" in DOCS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family, more, ways", [
    # Longrope takes other angles for all tokens once one of them stands behind position 32.
    ("phi3", dict(original_max_position_embeddings=32, rope_parameters=dict(
        rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4,
        original_max_position_embeddings=32)), (True, True, True)),
    ("nemotron_h", dict(use_bias=True), (False, True, True)),  # which padding goes through
    ("mamba2", dict(time_step_limit=[0.5, 1.0]), (False, False, False))])  # a cache forgets it
def test_a_trial_finds_what_a_config_puts_wrong(family, more, ways, dtype, encoder):
    """In bf16 rounding hides some of it, and nemotron_h's wrong way was once taken for right."""
    model = tiny_model(family, vocabulary=len(encoder.tokenizer), **more).to(dtype)
    model.generation_config = transformers.GenerationConfig()
    assert dpo.trial(model, encoder, LONGEST) == ways


@pytest.mark.parametrize("family", ["llama", "minimax", "moshi", "reformer"])
def test_a_trial_of_a_model_in_bf16_finds_what_it_finds_in_fp32(family, encoder):
    model = tiny_model(family, vocabulary=len(encoder.tokenizer)).to(torch.bfloat16)
    model.generation_config = transformers.GenerationConfig()
    try:
        found = WAYS[dpo.trial(model, encoder, LONGEST)]
    except dpo.Unusable:
        found = "refused"
    assert found == listed().get(family, WAYS[False, False, True]).partition(":")[0]


@pytest.mark.parametrize("error, expected", [
    (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError),
    (OSError("Input/output error"), OSError),
    (KeyError("past_key_values"), dpo.Unusable), (RuntimeError("sizes differ"), dpo.Unusable)])
def test_a_trial_tells_a_models_faults_from_the_machines(error, expected, encoder, monkeypatch):
    def failing(*_, **__):
        raise error

    model = tiny_model("llama", vocabulary=len(encoder.tokenizer))
    monkeypatch.setattr(model, "forward", failing)
    with pytest.raises(expected):
        dpo.trial(model, encoder, LONGEST)


@pytest.mark.parametrize("family", ["llama", "gemma2", "lfm2", "mamba", "nemotron_h", "bart"])
def test_a_static_cache_gives_the_same_replies(family, encoder, tmp_path):
    """On a card the trial tries it first; transformers has it for other devices too."""
    model = tiny_model(family, vocabulary=len(encoder.tokenizer))
    model.generation_config = transformers.GenerationConfig()
    found = []
    for cache in (True, "static"):
        asked = [(ids, random.Random(n)) for n, ids in enumerate(texts(encoder))]
        found.append(dpo.replies(model, encoder, encoder.sampler(0.7), 8, (), asked,
                                 family == "bart", cache))
    for (ids, log_probs), (static_ids, static_log_probs) in zip(*found):
        assert ids == static_ids and log_probs == pytest.approx(static_log_probs, abs=1e-4)


@pytest.mark.parametrize("family, name, text, more", [
    ("gemma3", "Gemma3ForConditionalGeneration", "Gemma3ForCausalLM", dict(mm_tokens_per_image=4)),
    ("gemma4", "Gemma4ForConditionalGeneration", "Gemma4ForCausalLM", {}),
    ("qwen3_5", "Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM", {}),
    ("llama4", "Llama4ForConditionalGeneration", "Llama4ForCausalLM", {})])
def test_of_a_checkpoint_that_reads_pictures_the_text_model_is_read(family, name, text, more,
                                                                    tmp_path):
    whole = tiny_model(family, kind=name, **more)
    whole.save_pretrained(tmp_path / "whole")
    ids = list(range(30, 60))
    expected = distributions(whole, ids)
    for before, after in (("whole", "text"), ("text", "again")):
        model = dpo.read_model(tmp_path / before).eval()
        assert type(model).__name__ == text
        assert (distributions(model, ids) - expected).abs().max() < 1e-5
        model.save_pretrained(tmp_path / after)


@pytest.mark.parametrize("family", ["falcon", "persimmon", "phimoe", "bart"])
def test_nothing_is_dropped_or_drawn_in_training(family):
    """Each takes its dropout from elsewhere; PhiMoE draws its experts in train mode."""
    model = tiny_model(family, hidden_dropout=0.3, attention_dropout=0.3, dropout=0.3)
    t = dpo.Trajectory(ids=list(range(30, 60)), action_mask=[0] + [1] * 29)
    expected = plain_log_probs(model, t.ids, t.action_mask)
    model.train()
    assert (plain_log_probs(model, t.ids, t.action_mask) - expected).abs().max() > 0.01
    config = model.config.to_dict()
    for recompute in (False, True):
        dpo.prepare(model, recompute)
        assert torch.equal(dpo.token_log_probs(model, [t]), expected)
    assert 0.3 in config.values() and model.config.to_dict() == config  # it is saved with an agent


def test_recomputed_layers_run_again():
    model, calls = tiny_model("llama"), []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(0))
    t = dpo.Trajectory(ids=list(range(30, 60)), action_mask=[0] + [1] * 29)
    for recompute, runs in ((False, 1), (True, 2)):
        calls.clear()
        dpo.token_log_probs(dpo.prepare(model, recompute), [t]).sum().backward()
        assert len(calls) == runs


RUN = ("--env webshop --view short --train-tasks 2 --eval-splits validation --eval-tasks 1 "
       "--iterations 1 --sft-epochs 1 --dpo-epochs 1 --max-tokens 420 --max-new-tokens 6 "
       "--sft-lr 1e-3 --dpo-lr 1e-3 --dpo-warmup 0 --lambda-sft 0 --gradient-checkpointing on").split()


def weights(folder) -> torch.Tensor:
    return torch.cat([p.flatten() for p in dpo.read_model(folder).parameters()])


@pytest.mark.parametrize("family", RUNS)
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
    rows = agent.config.get_text_config().vocab_size
    never = dpo.Encoder(tokenizer, rows).sampler().never
    played = coevolve.read(out / "iter1/target.jsonl")
    assert len(played) == 2
    for t in played:
        expected = plain_log_probs(agent, t.ids, t.action_mask, never, 0.7)
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


if __name__ == "__main__":
    encoder = dpo.Encoder(dpo.read(transformers.AutoTokenizer, coevolve.MODELS["tiny"]))
    lists = defaultdict(list)
    for family in every():
        with TemporaryDirectory() as folder:
            lists[outcome(family, folder, encoder)[0]].append(f"`{family}`")
    for heading, families in lists.items():
        print(f"- **{heading}** ({len(families)}): {', '.join(families)}")
