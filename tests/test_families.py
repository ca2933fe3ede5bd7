"""Families of causal language models in transformers, as tiny models, with the backends of engine/."""

import random

import pytest
import torch
import transformers
from conftest import plain_log_probs
from family_models import tiny_model
from test_engine import conversations, gradient_of

import dpo
from common.settings import UsageError
from dpo import Trajectory
from engine import models, prefix_sharing
from engine.chat import Encoder
from engine.sampling import Sampler, TokenSampler
from engine.self_check import make_generator, select_backends

LONGEST = 100  # tokens of a test sequence: six times the models' window


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


@pytest.mark.parametrize("family, replies", [
    ("llama", "kv_cache"), ("gemma3_text", "kv_cache"), ("lfm2", "batched"), ("bart", "single"),
    ("moshi", "refused"), ("roberta", "refused")])
def test_a_family_has_the_log_probs_of_plain_forward_passes_or_is_refused(
        family, replies, encoder, tmp_path):
    backends, model = tried(family, tmp_path, encoder)
    assert backends["replies"] == replies
    if model:
        assert backends["passes"]
        assert_replies_are_right(model, encoder, backends["replies"])
        for passes in backends["passes"]:
            assert_passes_are_right(model, encoder, passes)


@torch.no_grad()
def assert_replies_are_right(model, encoder, backend):
    """Checks that each token of conversations that begin and end at different turns has the
    log-probability of a plain forward pass."""
    never = (*encoder.sampler().suppressed_ids, encoder.end_of_turn)
    attention = model.config._attn_implementation
    draw = TokenSampler(Sampler(0.7, never), encoder, ())
    found = conversations(make_generator(backend, model, draw, 8, 200, 9, 200))
    model.set_attn_implementation(attention)
    for t in found.values():
        plain = plain_log_probs(model, t.ids, t.action_mask, never, 0.7)
        assert plain.tolist() == pytest.approx(t.log_probs, abs=1e-4)


def texts_of(encoder) -> list[list[int]]:
    """Returns three texts, of which two have a common prefix."""
    rng = random.Random(3)
    texts = [[rng.randrange(4, len(encoder.tokenizer)) for _ in range(n)] for n in (38, 19, 9)]
    return [texts[0], texts[0][:12] + texts[1], texts[2]]


def assert_passes_are_right(model, encoder, passes):
    """Checks log-probabilities of a batch, and their gradient with gradient checkpointing."""
    rng = random.Random(4)
    texts = [Trajectory(ids=ids, action_mask=[0] + [int(rng.random() < 0.5) for _ in ids[1:]])
             for ids in texts_of(encoder)]
    expected = torch.cat([plain_log_probs(model, t.ids, t.action_mask) for t in texts])
    wanted = gradient_of(model, expected)
    models.prepare(model, recompute=True)
    attention = model.config._attn_implementation
    if passes == "prefix_sharing":
        model.set_attn_implementation("prefix_sharing")
        found = prefix_sharing.log_probs(model, texts, 1000)
    else:
        found = dpo.token_log_probs(model, texts)
    assert (found - expected).abs().max() < 1e-4
    assert (gradient_of(model, found) - wanted).norm() < 1e-4 * wanted.norm()
    model.set_attn_implementation(attention)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family, more, backends", [
    ("llama", {}, ("kv_cache", ["prefix_sharing", "padded"])),
    # Longrope uses other angles for all tokens if one of them is beyond position 64.
    ("phi3", dict(original_max_position_embeddings=64, rope_parameters=dict(
        rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4,
        original_max_position_embeddings=64)), ("single", [])),
    ("nemotron_h", dict(use_bias=True), ("single", ["padded"]))])  # padding changes its replies
def test_the_self_check_finds_faults_that_depend_on_the_config(family, more, backends, dtype, encoder):
    """In bf16, rounding hides some of them, and a wrong backend of nemotron_h once passed."""
    model = tiny_model(family, vocabulary=len(encoder.tokenizer), **more).to(dtype)
    model.generation_config = transformers.GenerationConfig()
    assert tuple(select_backends(model, encoder, LONGEST).values()) == backends


@pytest.mark.parametrize("family, name, text, more", [
    ("gemma3", "Gemma3ForConditionalGeneration", "Gemma3ForCausalLM", dict(mm_tokens_per_image=4)),
    ("qwen3_5", "Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM", {})])
def test_of_a_multimodal_checkpoint_the_text_model_is_loaded(family, name, text, more, tmp_path):
    whole = tiny_model(family, kind=name, **more)
    whole.save_pretrained(tmp_path / "whole")
    ids = torch.arange(30, 60)[None]
    expected = whole(input_ids=ids, use_cache=False).logits
    for before, after in (("whole", "text"), ("text", "again")):
        model = models.read_model(tmp_path / before).eval()
        assert type(model).__name__ == text
        logits = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        model.save_pretrained(tmp_path / after)


ONE = Trajectory(ids=list(range(30, 60)), action_mask=[0] + [1] * 29)


@pytest.mark.parametrize("family", ["falcon", "persimmon", "phimoe", "bart"])
def test_training_has_no_dropout_and_no_random_routing(family):
    """Each family configures dropout in its own way. PhiMoE samples its experts in train mode."""
    model = tiny_model(family, hidden_dropout=0.3, attention_dropout=0.3, dropout=0.3)
    expected = plain_log_probs(model, ONE.ids, ONE.action_mask)
    model.train()
    assert (plain_log_probs(model, ONE.ids, ONE.action_mask) - expected).abs().max() > 0.01
    config = model.config.to_dict()
    for recompute in (False, True):
        models.prepare(model, recompute)
        assert torch.equal(dpo.token_log_probs(model, [ONE]), expected)
    assert 0.3 in config.values() and model.config.to_dict() == config  # config is saved with an agent


def test_recomputed_layers_run_again():
    model, calls = tiny_model("llama"), []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(0))
    for recompute, runs in ((False, 1), (True, 2)):
        calls.clear()
        dpo.token_log_probs(models.prepare(model, recompute), [ONE]).sum().backward()
        assert len(calls) == runs
