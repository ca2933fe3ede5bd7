"""What large models need, by arithmetic of their configs: episodes that fit a card, and disk."""

from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, MambaConfig, Qwen3Config, RwkvConfig

import coevolve
import evolve
from common.settings import Refused
from engine import run as engine_run
from engine.machine import SLOTS, fits_in_fp32, slots_that_fit
from lab import baselines

H100 = 84.8e9  # bytes
LLAMA2_7B = LlamaConfig(num_hidden_layers=32, hidden_size=4096, vocab_size=32000,
                        intermediate_size=11008, num_attention_heads=32)
LLAMA2_13B = LlamaConfig(num_hidden_layers=40, hidden_size=5120, vocab_size=32000,
                         intermediate_size=13824, num_attention_heads=40)
QWEN3_4B = Qwen3Config(num_hidden_layers=36, hidden_size=2560, intermediate_size=9728,
                       num_attention_heads=32, vocab_size=151936, head_dim=128,
                       num_key_value_heads=8, tie_word_embeddings=True)


@pytest.mark.parametrize("config, weights, card, tokens, slots", [
    # By hand: keys and values of 32 layers, 2 x 32 x 4096 x 2 bytes a token; the inside of a layer,
    # 2 x (6 x 4096 + 3 x 11008).
    (LLAMA2_7B, 13.5e9, H100, 4096, int(0.92 * (H100 - 13.5e9) / (
        (2 * 32 * 4096 * 2 + 2 * (6 * 4096 + 3 * 11008)) * 4096))),
    (LLAMA2_7B, 13.5e9, H100, 4352, 23), (LLAMA2_13B, 26.0e9, H100, 4352, 12),
    (LLAMA2_7B, 13.5e9, 15e9, 4352, 1),
    (QWEN3_4B, 8.0e9, H100, 4352, 68), (QWEN3_4B, 8.0e9, 24e9, 4352, 14),
    (QWEN3_4B, 8.0e9, 8 * H100, 4352, SLOTS)])
def test_slots_fill_what_is_free(config, weights, card, tokens, slots):
    assert slots_that_fit(config, card - weights, tokens) == slots
    # Rows that are all as long as the longest can be fit beside the weights.
    heads = config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    filled = weights + slots * tokens * 4 * config.num_hidden_layers * heads * size
    assert slots == 1 or filled < 0.95 * card


def test_in_fp32_an_episode_takes_twice_the_room():
    """By hand: keys and values of 32 layers, and the inside of one, with 4 bytes a number."""
    each = 4 * (2 * 32 * 4096 + 6 * 4096 + 3 * 11008) * 4096
    assert slots_that_fit(LLAMA2_7B, 57e9, 4096, bf16=False) == int(0.92 * 57e9 / each) == 10


@pytest.mark.parametrize("config", [MambaConfig(), RwkvConfig()])
def test_a_model_without_heads_needs_room_for_the_inside_of_a_layer(config):
    free = 10 * 100 * 2 * (6 * config.hidden_size + 3 * config.intermediate_size)
    assert slots_that_fit(config, free / 0.92 + 1, 100) == 10


def test_a_trial_needs_room_for_fp32():
    """Weights of 4 bytes, and three times the scores of all heads of two texts."""
    assert fits_in_fp32(MambaConfig(), 10, 44, 4096) and not fits_in_fp32(MambaConfig(), 10, 43, 4096)
    scores = 3 * 2 * 32 * 4096 ** 2 * 4
    needed = (4 * 6.738e9 + scores) / 0.92
    assert fits_in_fp32(LLAMA2_7B, 6_738_000_000, needed + 1e3, 4096)
    assert not fits_in_fp32(LLAMA2_7B, 6_738_000_000, needed - 1e3, 4096)


@pytest.mark.parametrize("methods, expected", [
    (coevolve.METHODS, dict(coevolve=8, eto=4, sft=1, positive=8)),
    # Each agent with two moments; the last segment is a part of one.
    (evolve.METHODS, dict(evolve=1 + 3 * 12, grpo=1 + 3 * 12)),
    (baselines.METHODS, dict(rft=2, dart=2, ppo=4))])
def test_how_many_models_a_folder_has_in_the_end(methods, expected):
    found = {}
    for name, method in methods.items():
        s = SimpleNamespace(method=name, iterations=3, warm_start="sft", grpo_steps=56,
                            evolve_every=5)
        found[name] = method.agents(s)
    assert found == expected


def test_a_disk_without_room_is_refused(tmp_path, monkeypatch):
    """Eight agents of Llama-2-7B are 216 GB. What the folder holds already counts, moments too, if
    it is recorded."""
    run = SimpleNamespace(parameters=6_738_000_000, folder=tmp_path, recorded={})
    monkeypatch.setattr(engine_run.shutil, "disk_usage", lambda _: SimpleNamespace(free=100e9))
    with pytest.raises(Refused, match=r"100.0 GB are free, and the run writes 215.6 GB more"):
        engine_run.check_disk(run, 8)
    run.recorded = {"experts.jsonl": {}, "sft-target": {}}
    for name, file, size in (("sft-target", "model.safetensors", 40e9), ("other", "a.pt", 60e9),
                             ("sft-target", "moments.pt", 60e9)):
        with pytest.raises(Refused):
            engine_run.check_disk(run, 8)
        (tmp_path / name).mkdir(exist_ok=True)
        with open(tmp_path / name / file, "wb") as zeros:
            zeros.truncate(int(size))  # which take no room
    with pytest.raises(Refused, match="writes 115.6 GB more"):
        engine_run.check_disk(run, 8)
    engine_run.check_disk(run, 7)
