"""Estimates of the GPU memory that large models need, computed from their configs."""

import re
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, Qwen3Config, RwkvConfig

from dpo import Group, Trajectory
from engine import machine
from engine.machine import SLOTS, check_memory, slots_that_fit, training_bytes

H100 = 84.8e9  # bytes
LLAMA2_7B = LlamaConfig(num_hidden_layers=32, hidden_size=4096, vocab_size=32000,
                        intermediate_size=11008, num_attention_heads=32)


def qwen3(hidden, intermediate, layers=28, heads=16):
    return Qwen3Config(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=intermediate,
                       num_attention_heads=heads, vocab_size=151936, head_dim=128,
                       num_key_value_heads=8, tie_word_embeddings=True)


QWEN3_06B, QWEN3_17B, QWEN3_4B = qwen3(1024, 3072), qwen3(2048, 6144), qwen3(2560, 9728, 36, 32)


@pytest.mark.parametrize("free, bf16, size", [(H100 - 13.5e9, True, 2), (57e9, False, 4)])
def test_slots_by_hand(free, bf16, size):
    """A prefill needs the activations of a layer and a mask. A row needs the keys and values of 32
    layers, and the logits that a token is sampled from. A number has `size` bytes."""
    prefill = 4096 * (size * (6 * 4096 + 3 * 11008) + 12 * 4096)
    row = 2 * 32 * 4096 * size * 4096 + 32 * 32000
    assert slots_that_fit(LLAMA2_7B, free, 4096, bf16) == int((0.92 * free - prefill) / row)


@pytest.mark.parametrize("config, free, slots", [
    (LLAMA2_7B, 1.5e9, 1), (QWEN3_4B, H100 - 8e9, 108), (RwkvConfig(), 8e9, SLOTS)])
def test_slots_are_between_1_and_the_limit(config, free, slots):
    assert slots_that_fit(config, free, 4352) == slots


@pytest.mark.parametrize("config, parameters, recompute, peaks", [
    (QWEN3_06B, 596e6, True, (11.58, 12.89)), (QWEN3_06B, 596e6, False, (24.18, 27.93)),
    (QWEN3_17B, 1.72e9, True, (30.81, 33.91)), (QWEN3_17B, 1.72e9, False, (50.14, 55.29))])
def test_the_plan_of_training_covers_what_an_h100_took(config, parameters, recompute, peaks):
    """`peaks` are the lowest and the highest measured peak in GB, with 8,192 tokens per pass."""
    planned = sum(training_bytes(config, parameters, 1, 8192, recompute)) / 1e9
    assert max(peaks) < planned < 1.6 * min(peaks)


@pytest.mark.parametrize("card, ranks, parameters, says", [
    (24e9, 8, 6.74e9, None),
    (H100, 1, 6.74e9, "6.74 B parameters on 1 x 85 GB: .* optimiser states take 121 GB .*; use more or"),
    (24e9, 8, 13e9, "the inference copy takes 26 GB on each GPU; use larger GPUs"),
    (16e9, 8, 6.74e9, r"lower --tokens-per-forward, .* to \d+$")])
def test_a_model_that_does_not_fit_is_refused(card, ranks, parameters, says, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=card))

    def said(tokens):
        return check_memory(LLAMA2_7B, parameters, ranks, tokens, False)

    if not says:
        assert said(8192) is None
        return
    assert re.search(says, said(8192))
    if "lower" in says:
        tokens = int(said(8192).split()[-1])
        assert said(tokens) is None and said(tokens + 512)


@pytest.mark.parametrize("group, ranks, on", [(1, 1, False), (3, 1, True), (3, 4, False)])
def test_a_group_that_exceeds_a_forward_pass_is_planned_as_a_whole(group, ranks, on, monkeypatch):
    """A group is one micro-batch, of which each rank keeps ceil(group / ranks) trajectories. On a GPU
    that holds one pass of 4,096 tokens and no more, gradient checkpointing depends on this."""
    s = SimpleNamespace(model="m", max_tokens=4096)
    needed = sum(training_bytes(LLAMA2_7B, 1e9, ranks, 4096, False)) / machine.USABLE
    monkeypatch.setattr(machine, "free_memory", lambda: needed + 1e9)
    monkeypatch.setattr(machine, "check_memory", lambda *_: None)
    own = SimpleNamespace(device=SimpleNamespace(type="cuda"), ranks=ranks, tokens_per_forward=4096,
                          checkpointing="auto")
    machine.Machine.plan(own, s, LLAMA2_7B, 1e9, False)
    groups = [Group([Trajectory(ids=[0])]), Group([Trajectory(ids=[0] * 4096)] * group)]
    assert machine.Machine.recomputes(own, groups) == on
