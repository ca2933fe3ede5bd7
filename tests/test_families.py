"""Families of causal language models in transformers, as tiny models, with the backends of engine/."""

from dataclasses import replace

import pytest
import torch
from conftest import plain_log_probs, refusal, table
from family_models import tiny_model
from test_engine import branches, conversations, gradient_of

import dpo
from dpo import Trajectory
from engine import models, prefix_sharing
from engine.sampling import Sampler, TokenSampler
from engine.self_check import make_generator, select_backends

LONGEST = 100  # tokens of a test sequence: six times the models' window
# Longrope uses other angles for all tokens if one of them is beyond position 64. Padding changes the
# replies of nemotron_h with a bias.
MORE = dict(nemotron_h=dict(use_bias=True), phi3=dict(
    original_max_position_embeddings=64, rope_parameters=dict(
        rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4,
        original_max_position_embeddings=64)))


@pytest.mark.parametrize("family, replies, passes", table("""
    llama -> kv_cache -> prefix_sharing padded
    gpt2 -> kv_cache -> prefix_sharing padded
    gemma3_text -> kv_cache -> padded
    gpt_oss -> kv_cache -> padded
    lfm2 -> batched -> padded
    mamba -> batched -> padded
    minimax -> single -> padded
    bart -> single -> padded
    nemotron_h -> single -> padded
    phi3 -> single ->
    moshi -> refused -> MoshiForCausalLM cannot be used: the log-probabilities of its replies differ
    roberta -> refused -> RobertaForCausalLM cannot be used:
"""))
def test_the_self_check_selects_the_fastest_correct_backends(
        family, replies, passes, words, tmp_path):
    """They have the log-probabilities of plain forward passes. A model in bf16 is checked in fp32,
    since rounding hides some faults. The check leaves the model's attention as it was."""
    tiny_model(family, len(words.tokenizer), **MORE.get(family, {})).save_pretrained(tmp_path)
    model = models.read_model(tmp_path).eval()
    attention = model.config._attn_implementation
    half = models.read_model(tmp_path).eval().to(torch.bfloat16)
    if replies == "refused":
        assert passes in refusal(select_backends, half, words, LONGEST)
        return
    backends = dict(replies=replies, passes=passes.split())
    assert select_backends(half, words, LONGEST) == backends
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    assert half.config._attn_implementation == attention
    if passes:  # otherwise the order in which a model reads tokens changes its results
        assert_replies_are_right(model, words, replies)
    for backend in backends["passes"]:
        assert_passes_are_right(model, backend)


@torch.no_grad()
def assert_replies_are_right(model, encoder, backend):
    """Checks the log-probabilities of replies in conversations that begin and end at any turn."""
    never = (*encoder.sampler().suppressed_ids, encoder.end_of_turn)
    attention = model.config._attn_implementation
    draw = TokenSampler(Sampler(0.7, never), encoder, ())
    found = conversations(make_generator(backend, model, draw, 8, 200, 9, 200))
    model.set_attn_implementation(attention)
    for t in found.values():
        plain = plain_log_probs(model, t.ids, t.action_mask, never, 0.7)
        assert plain.tolist() == pytest.approx(t.log_probs, abs=1e-4)


def assert_passes_are_right(model, backend):
    """Checks log-probabilities of a batch, and their gradient with gradient checkpointing."""
    batch = [replace(t, ids=[4 + token for token in t.ids]) for t in branches()]
    expected = torch.cat([plain_log_probs(model, t.ids, t.action_mask) for t in batch])
    wanted = gradient_of(model, expected)
    models.prepare(model, recompute=True)
    attention = model.config._attn_implementation
    if backend == "prefix_sharing":
        model.set_attn_implementation("prefix_sharing")
        found = prefix_sharing.log_probs(model, batch, 1000)
    else:
        found = dpo.token_log_probs(model, batch)
    assert (found - expected).abs().max() < 1e-4
    assert (gradient_of(model, found) - wanted).norm() < 1e-4 * wanted.norm()
    model.set_attn_implementation(attention)


@pytest.mark.parametrize("family, name, text, more", [
    ("gemma3", "Gemma3ForConditionalGeneration", "Gemma3ForCausalLM", dict(mm_tokens_per_image=4)),
    ("qwen3_5", "Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM", {})])
def test_of_a_multimodal_checkpoint_the_text_model_is_loaded(family, name, text, more, tmp_path):
    whole = tiny_model(family, kind=name, **more)
    whole.save_pretrained(tmp_path)
    model = models.read_model(tmp_path).eval()
    assert type(model).__name__ == text
    ids = torch.arange(30, 60)[None]
    logits = [each(input_ids=ids, use_cache=False).logits for each in (model, whole)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)


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
