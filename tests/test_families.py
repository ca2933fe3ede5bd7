"""Families of causal language models in transformers, as tiny models, with the backends of engine/."""

from dataclasses import replace

import pytest
import torch
from conftest import plain_log_probs, refusal, table
from family_models import tiny_model
from test_engine import branches, conversations, gradient_of

import dpo
from dpo import Trajectory
from engine import models
from engine.sampling import Sampler, TokenSampler
from engine.self_check import make_generator, select_backends

LONGEST = 100  # tokens of a test sequence: six times the models' window


@pytest.mark.parametrize("family, replies, passes", table("""
    llama -> kv_cache -> prefix_sharing padded
    gpt2 -> kv_cache -> prefix_sharing padded
    gemma3_text -> kv_cache -> padded
    gpt_oss -> kv_cache -> padded
    mamba -> batched -> padded
    zamba -> batched -> padded
    bart -> single -> padded
    phi3 -> single ->
    roberta -> refused -> RobertaForCausalLM cannot be used: the log-probabilities of its replies differ
"""))
def test_the_self_check_selects_the_fastest_correct_backends(
        family, replies, passes, words, tmp_path):
    """They have the log-probabilities and gradients of plain forward passes. A model in bf16 is
    checked in fp32, since rounding hides some faults. The check leaves its attention as it was."""
    tiny_model(family, len(words.tokenizer)).save_pretrained(tmp_path)
    model = models.read_model(tmp_path)
    attention = model.config._attn_implementation
    half = models.read_model(tmp_path).to(torch.bfloat16)
    if replies == "refused":
        assert passes in refusal(select_backends, half, words, LONGEST)
        return
    assert select_backends(half, words, LONGEST) == dict(replies=replies, passes=passes.split())
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    assert half.config._attn_implementation == attention
    if passes:  # otherwise the order in which a model reads tokens changes its results
        assert_replies_are_right(model, words, replies)
        assert_padded_passes_are_right(model)


@torch.no_grad()
def assert_replies_are_right(model, encoder, backend):
    """Checks the log-probabilities of replies in conversations that begin and end at any turn."""
    never = (*encoder.sampler().suppressed_ids, encoder.end_of_turn)
    draw = TokenSampler(Sampler(0.7, never), encoder, ())
    found = conversations(make_generator(backend, model, draw, 8, 200, 9, 200))
    for t in found.values():
        plain = plain_log_probs(model, t.ids, t.action_mask, never, 0.7)
        assert plain.tolist() == pytest.approx(t.log_probs, abs=1e-4)


def assert_padded_passes_are_right(model):
    """Checks log-probabilities of a batch, and their gradient with gradient checkpointing."""
    batch = [replace(t, ids=[4 + token for token in t.ids]) for t in branches()]
    expected = torch.cat([plain_log_probs(model, t.ids, t.action_mask) for t in batch])
    wanted = gradient_of(model, expected)
    found = dpo.token_log_probs(models.prepare(model, recompute=True), batch)
    assert (found - expected).abs().max() < 1e-4
    assert (gradient_of(model, found) - wanted).norm() < 1e-4 * wanted.norm()


def test_of_a_multimodal_checkpoint_the_text_model_is_loaded(tmp_path):
    whole = tiny_model("gemma3", text_config=tiny_model("gemma3_text").config.to_dict(),
                       vision_config=dict(hidden_size=48, num_hidden_layers=2),
                       mm_tokens_per_image=4)
    whole.save_pretrained(tmp_path)
    model = models.read_model(tmp_path)
    assert type(model).__name__ == "Gemma3ForCausalLM"
    ids = torch.arange(30, 60)[None]
    logits = [each(input_ids=ids, use_cache=False).logits for each in (model, whole)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)


def test_training_has_no_dropout_and_recomputed_layers_run_again():
    model = tiny_model("bart", dropout=0.3, attention_dropout=0.3)
    one = Trajectory(ids=[*range(30, 60)], action_mask=[0] + [1] * 29)
    expected = dpo.token_log_probs(model, [one])
    assert not torch.equal(dpo.token_log_probs(model.train(), [one]), expected)
    calls = []
    models.layers(model)[0].self_attn.register_forward_hook(lambda *_: calls.append(0))
    for recompute, runs in ((False, 1), (True, 2)):
        calls.clear()
        found = dpo.token_log_probs(models.prepare(model.train(), recompute), [one])
        assert torch.equal(found, expected)
        found.sum().backward()
        assert len(calls) == runs
