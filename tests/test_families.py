"""Every family of causal language models of text that transformers can build small, on the engine.

`FAMILIES=all bash run.sh test tests/test_families.py` tries all; else it is one of each kind.
"""

import json
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
from common.settings import UsageError
from dpo import Trajectory
from engine import models, prefix_sharing
from engine.chat import Encoder
from engine.records import read
from engine.run import Run
from engine.sampling import Sampler, TokenSampler
from engine.self_check import make_generator, select_backends
from environments import environment

LISTS = (Path(__file__).parent / "data" / "families.md").read_text(encoding="utf-8")
ALL = os.environ.get("FAMILIES") == "all"
LONGEST = 100  # tokens of a test sequence: six times the models' window
RUNS = ("deepseek_v3 falcon_h1 gpt_oss gemma3_text gemma4_text granitemoehybrid lfm2 llama mamba "
        "qwen3 qwen3_5_text qwen3_next").split()[:12 if ALL else 3]


def every() -> list[str]:
    """Others are another family's classes, or load as the text model of another family."""
    kinds = {name: default(name).model_type for name in CLASSES if name not in MUSIC}
    return [name for name, kind in kinds.items() if kind == name or kind not in CLASSES]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(models.MODELS["tiny"])


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return Encoder(tokenizer)


def tried(family: str, folder, encoder) -> tuple[dict, torch.nn.Module | None]:
    """Returns the result of the self-check of a family, and the model as loaded after saving."""
    tiny_model(family, vocabulary=len(encoder.tokenizer)).save_pretrained(folder)
    try:
        backends = select_backends(models.read_model(folder).eval(), encoder, LONGEST)
        return backends, models.read_model(folder).eval()
    except UsageError:
        return dict(replies="refused", passes=[]), None


def listed() -> dict[str, str]:
    """Returns family -> backend, or "refused", as data/families.md lists it. A family that it does
    not list uses the first backend."""
    return {family: heading for heading, families in
            re.findall(r"^- \*\*(.+?)[*:].*?: (.+)$", LISTS, re.MULTILINE)
            for family in re.findall("`(.+?)`", families)}


@pytest.mark.parametrize(
    "family", every() if ALL else "llama gemma3_text lfm2 bart moshi roberta".split())
def test_a_family_trains_and_plays_as_it_reads_a_text_alone_or_is_refused(
        family, encoder, tmp_path):
    backends, model = tried(family, tmp_path, encoder)
    if f"transformers {transformers.__version__}" in LISTS:
        assert listed().get(family, "kv_cache") == backends["replies"], "this file prints the lists"
    if model:
        assert backends["passes"]
        assert_replies_are_right(model, encoder, backends["replies"])
        for passes in backends["passes"]:
            assert_passes_are_right(model, encoder, passes)


@torch.no_grad()
def assert_replies_are_right(model, encoder, backend):
    """In two turns of three conversations, of which then one ends and another begins, each token
    has the log-probability of a plain pass over the whole text. Who talks beside changes nothing.
    """
    never = (*encoder.sampler().suppressed_ids, encoder.end_of_turn)
    together = conversations(model, encoder, backend, never, range(4))
    for t in together:
        plain = plain_log_probs(model, t.ids, t.action_mask, never, 0.7)
        assert (plain - torch.tensor(t.log_probs)).abs().max() < 1e-4
    assert conversations(model, encoder, backend, never, [1])[0].ids == together[1].ids


def conversations(model, encoder, backend, never, which):
    """Some of four conversations: the last of them begins when the first has ended."""
    texts, rng = texts_of(encoder), random.Random(5)
    begun = [(Trajectory(ids=list(ids), action_mask=[0] * len(ids)), random.Random(n))
             for n, ids in enumerate([*texts, texts[1] + [7, 8]])]
    told = rng.choices(texts[0], k=6)
    attention = model.config._attn_implementation
    answer = make_generator(backend, model, TokenSampler(Sampler(0.7, never), encoder, ()), 3, LONGEST, 5, LONGEST)
    for playing in [0, 1, 2], [0, 1, 2], [1, 2, 3]:
        asked = [begun[n] for n in playing if n in which]
        for (t, _), (ids, log_probs) in zip(asked, answer(asked)):
            t.extend(ids, is_action=True)
            t.log_probs += log_probs
            t.extend(told, is_action=False)
    model.set_attn_implementation(attention)
    return [begun[n][0] for n in which]


def texts_of(encoder) -> list[list[int]]:
    """Three texts, of which two begin alike."""
    rng = random.Random(3)
    texts = [[rng.randrange(4, len(encoder.tokenizer)) for _ in range(n)] for n in (38, 19, 9)]
    return [texts[0], texts[0][:12] + texts[1], texts[2]]


def gradient(model, log_probs: torch.Tensor) -> torch.Tensor:
    """Of a weighted sum, with respect to all parameters."""
    model.zero_grad()
    (log_probs * torch.linspace(-1, 2, len(log_probs))).sum().backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                      for p in model.parameters()])


def assert_passes_are_right(model, encoder, passes):
    """Log-probabilities of a pass over several texts, and their gradient, whose layers run again.
    """
    rng = random.Random(4)
    texts = [Trajectory(ids=ids, action_mask=[0] + [int(rng.random() < 0.5) for _ in ids[1:]])
             for ids in texts_of(encoder)]
    expected = torch.cat([plain_log_probs(model, t.ids, t.action_mask) for t in texts])
    wanted = gradient(model, expected)
    models.prepare(model, recompute=True)
    attention = model.config._attn_implementation
    if passes == "prefix_sharing":
        model.set_attn_implementation("prefix_sharing")
        found = prefix_sharing.log_probs(model, texts, 1000)
    else:
        found = dpo.token_log_probs(model, texts)
    assert (found - expected).abs().max() < 1e-4
    assert (gradient(model, found) - wanted).norm() < 1e-4 * wanted.norm()
    model.set_attn_implementation(attention)


def test_the_document_counts_what_it_lists():
    for heading, count, families in re.findall(r"^- \*\*(.+?)\*\* \((\d+).*?\): (.+)$", LISTS,
                                               re.MULTILINE):
        assert len(re.findall("`(.+?)`", families)) == int(count), heading
    if f"transformers {transformers.__version__}" in LISTS:
        assert f"all {len(every())} families" in LISTS
        assert f"{len(every()) - len(listed())} families use the backend `kv_cache`" in LISTS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family, more, backends", [
    ("llama", {}, ("kv_cache", ["prefix_sharing", "padded"])),
    # Longrope takes other angles for all tokens once one of them stands behind position 64.
    ("phi3", dict(original_max_position_embeddings=64, rope_parameters=dict(
        rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4,
        original_max_position_embeddings=64)), ("single", [])),
    ("nemotron_h", dict(use_bias=True), ("single", ["padded"]))])  # which padding goes through
def test_the_self_check_finds_faults_that_depend_on_the_config(family, more, backends, dtype, encoder):
    """In bf16, rounding hides some of them, and a wrong backend of nemotron_h once passed."""
    model = tiny_model(family, vocabulary=len(encoder.tokenizer), **more).to(dtype)
    model.generation_config = transformers.GenerationConfig()
    assert tuple(select_backends(model, encoder, LONGEST).values()) == backends


def distributions(model, ids: list[int]) -> torch.Tensor:
    """log pi of every next token, (l - 1, V), by transformers alone: one text, no cache."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)


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
        model = models.read_model(tmp_path / before).eval()
        assert type(model).__name__ == text
        assert (distributions(model, ids) - expected).abs().max() < 1e-5
        model.save_pretrained(tmp_path / after)


ONE = Trajectory(ids=list(range(30, 60)), action_mask=[0] + [1] * 29)


@pytest.mark.parametrize("family", ["falcon", "persimmon", "phimoe", "bart"])
def test_nothing_is_dropped_or_drawn_in_training(family):
    """Each takes its dropout from elsewhere; PhiMoE draws its experts in train mode."""
    model = tiny_model(family, hidden_dropout=0.3, attention_dropout=0.3, dropout=0.3)
    expected = plain_log_probs(model, ONE.ids, ONE.action_mask)
    model.train()
    assert (plain_log_probs(model, ONE.ids, ONE.action_mask) - expected).abs().max() > 0.01
    config = model.config.to_dict()
    for recompute in (False, True):
        models.prepare(model, recompute)
        assert torch.equal(dpo.token_log_probs(model, [ONE]), expected)
    assert 0.3 in config.values() and model.config.to_dict() == config  # it is saved with an agent


def test_recomputed_layers_run_again():
    model, calls = tiny_model("llama"), []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(0))
    for recompute, runs in ((False, 1), (True, 2)):
        calls.clear()
        dpo.token_log_probs(models.prepare(model, recompute), [ONE]).sum().backward()
        assert len(calls) == runs


def weights(folder) -> torch.Tensor:
    return torch.cat([p.flatten() for p in models.read_model(folder).parameters()])


@pytest.mark.parametrize("family", RUNS)
def test_a_family_runs_the_whole_loop(family, tokenizer, tmp_path):
    base, out = tmp_path / "model", tmp_path / "run"
    tiny_model(family, vocabulary=len(tokenizer)).save_pretrained(base)
    tokenizer.save_pretrained(base)
    s = coevolve.Settings(
        view="short", model=str(base), out=str(out), train_tasks=2, eval_splits="validation",
        eval_tasks=1, iterations=1, sft_epochs=1, dpo_epochs=1, max_tokens=420, max_new_tokens=6,
        sft_lr=1e-3, dpo_lr=1e-3, dpo_warmup=0.0, lambda_sft=0.0, gradient_checkpointing="on")
    run = Run(s, environment("webshop")())
    coevolve.coevolve(run)
    assert "iter1/target-agent" in json.loads((out / "phases.json").read_text())

    # What was played is what the agent's plain passes give, to rounding.
    agent = models.read_model(out / "sft-target").eval()
    never = run.encoder.sampler().suppressed_ids
    played = read(out / "iter1/target.jsonl")
    assert len(played) == 2
    for t in played:
        expected = plain_log_probs(agent, t.ids, t.action_mask, never, 0.7)
        assert (torch.tensor(t.log_probs) - expected).abs().max() < 1e-3

    # The first step of a preference phase finds policy and reference equal, so no dropout is left.
    [first, *_] = read_jsonl(out / "iter1/target-agent/train.jsonl")
    assert all(abs(row["margin"]) < 1e-4 for row in first["kinds"].values())
    # Each phase moves the weights that it was given.
    moved = [weights(folder) for folder in (base, out / "sft-target", out / "iter1/target-agent")]
    for before, after in zip(moved, moved[1:]):
        assert (before - after).abs().max() > 1e-4


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    own = Encoder(transformers.AutoTokenizer.from_pretrained(models.MODELS["tiny"]))
    lists = defaultdict(list)
    for name in every():
        with TemporaryDirectory() as folder:
            found, _ = tried(name, folder, own)
            lists[found["replies"]].append(f"`{name}`")
            lists[f"passes {found['passes']}"].append(f"`{name}`")
    for heading, families in lists.items():
        print(f"- **{heading}** ({len(families)}): {', '.join(families)}")
