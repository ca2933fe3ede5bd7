"""Weights in the order of the CPU's kernels: the same numbers as transformers' own."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from engine import prepacked

SHAPE = dict(vocab_size=500, hidden_size=96, intermediate_size=250, num_hidden_layers=2,
             num_attention_heads=6, num_key_value_heads=2)
x86 = pytest.mark.skipif(not prepacked.known(torch.float32), reason="no x86 CPU")
bf16 = pytest.mark.skipif(not prepacked.known(torch.bfloat16), reason="a CPU without bf16")


@pytest.fixture(autouse=True)
def no_model_is_small(monkeypatch):
    monkeypatch.setattr(prepacked, "SMALL", 0)


def make(dtype, tied=True, bias=False):
    torch.manual_seed(0)
    config, model = (Qwen2Config, Qwen2ForCausalLM) if bias else (LlamaConfig, LlamaForCausalLM)
    model = model(config(**SHAPE, tie_word_embeddings=tied))
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias)
    return model.to(dtype)


@torch.inference_mode()
def logits(model, *shape):
    torch.manual_seed(1)
    return model(torch.randint(SHAPE["vocab_size"], shape), use_cache=False).logits.double()


def layers(model) -> int:
    return sum(type(module) is prepacked.Prepacked for module in model.modules())


@x86
@pytest.mark.parametrize("tied, bias", [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (1, 64), (3, 111)])
def test_logits_in_fp32(tied, bias, shape):
    model = make(torch.float32, tied=tied, bias=bias)
    prepacked.prepack(model)
    assert layers(model) == 2 * 7 + 1
    exact = logits(make(torch.float64, tied=tied, bias=bias), *shape)
    assert (logits(model, *shape) - exact).abs().max() < 1e-5 * exact.abs().max()


@bf16
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 111)])
def test_logits_in_bf16_are_as_near_as_torchs(shape):
    model, plain = make(torch.bfloat16, bias=True), make(torch.bfloat16, bias=True)
    prepacked.prepack(model)
    assert layers(model) == 2 * 7 + 1
    exact = logits(make(torch.float64, bias=True), *shape)
    ours, theirs = ((logits(m, *shape) - exact).square().mean().sqrt() for m in (model, plain))
    assert 0 < theirs and ours < 1.2 * theirs


@x86
def test_tied_embeddings_stay_as_they_are():
    model = make(torch.float32)
    before = model.get_input_embeddings().weight.clone()
    prepacked.prepack(model)
    assert torch.equal(model.get_input_embeddings().weight, before)


@pytest.mark.parametrize("dtype, small", [(torch.float32, 10 ** 6), (torch.float64, 0)])
def test_small_models_and_other_formats_stay_as_they_are(dtype, small, monkeypatch):
    monkeypatch.setattr(prepacked, "SMALL", small)
    model = make(dtype)
    prepacked.prepack(model)
    assert layers(model) == 0
