"""Weights in the order of the CPU's kernels: the same numbers as transformers' own."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from lab.fast import prepacked

SHAPE = dict(vocab_size=500, hidden_size=96, intermediate_size=250, num_hidden_layers=2,
             num_attention_heads=6, num_key_value_heads=2)
SHAPES = (1, 1), (1, 5), (1, 64), (3, 111)
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


def ordered(model):
    prepacked.prepack(model)
    assert sum(type(m) is prepacked.Prepacked for m in model.modules()) == 2 * 7 + 1
    return model


@torch.inference_mode()
def logits(model, shape):
    torch.manual_seed(1)
    return model(torch.randint(SHAPE["vocab_size"], shape), use_cache=False).logits.double()


@x86
@pytest.mark.parametrize("tied, bias", [(True, False), (True, True), (False, True)])
def test_logits_in_fp32(tied, bias):
    plain, model = make(torch.float32, tied, bias), ordered(make(torch.float32, tied, bias))
    assert torch.equal(*(m.get_input_embeddings().weight for m in (plain, model)))
    for shape in SHAPES:
        exact = logits(make(torch.float64, tied, bias), shape)
        assert (logits(model, shape) - exact).abs().max() < 1e-5 * exact.abs().max()


@bf16
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_in_bf16_are_as_near_as_torchs(shape):
    model, plain = ordered(make(torch.bfloat16, bias=True)), make(torch.bfloat16, bias=True)
    exact = logits(make(torch.float64, bias=True), shape)
    ours, other = ((logits(m, shape) - exact).square().mean().sqrt() for m in (model, plain))
    assert 0 < other and ours < 1.2 * other


@pytest.mark.parametrize("reason", ["small", "format", "no operators", "no AVX"])
def test_other_models_and_machines_keep_torchs_layers(reason, monkeypatch):
    if reason == "small":
        monkeypatch.setattr(prepacked, "SMALL", 10 ** 6)
    elif reason == "no operators":  # of another version of torch
        monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    elif reason == "no AVX":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    dtype = torch.float64 if reason == "format" else torch.float32
    model = make(dtype)
    prepacked.prepack(model)
    assert torch.equal(logits(model, (3, 5)), logits(make(dtype), (3, 5)))
