"""Code for GPUs, tested on a CPU: options, micro-batches, fused norms, compiled layers, memory."""

import gc
import math
import os
import random
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import in_ranks, make_model
from family_models import tiny_model
from test_dpo import random_trajectories
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

import dpo
from dpo import Group
from engine import models
from engine.forward_passes import cost, fits_in_round, schedule_rounds
from engine.machine import accelerator_of


@pytest.mark.parametrize("given, expected", [
    ({}, "expandable_segments:True"), (dict(PYTORCH_CUDA_ALLOC_CONF="mine"), "mine"),
    (dict(PYTORCH_ALLOC_CONF="mine"), None)])
def test_options_of_cuda(given, expected, monkeypatch):
    """Expandable segments unless the user gives another value, no cuDNN attention, and no TF32."""
    monkeypatch.setattr(os, "environ", given)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cuda.matmul.allow_tf32 = True
    accelerator_of(gpu=False, bf16=False)
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == expected
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert not torch.backends.cuda.matmul.allow_tf32


def batch_of(*lengths):
    """Returns tasks with one trajectory each, of these lengths."""
    return [Group([t]) for t in random_trajectories(*lengths)]


def test_micro_batches_fill_one_forward_pass_of_each_rank():
    """By hand, with at most 10 tokens: 8 and 5 + 5 are two forward passes, though three rows of 8
    have 24 tokens. On one rank 8 and 5 are padded to 16. Of random lengths, each trajectory is in
    one forward pass, no rank holds more than 8,192 tokens, and ranks are hardly idle."""
    parts = [[len(groups) for groups in dpo.micro_batches(
        batch_of(5, 8, 5), partial(fits_in_round, tokens=10, ranks=ranks))] for ranks in (1, 2, 3)]
    assert parts == [[1, 2], [3], [3]]
    rng = random.Random(5)
    own = time = 0
    for _ in range(20):
        batch = batch_of(*(int(rng.lognormvariate(math.log(1850), 0.5)) for _ in range(60)))
        for groups in dpo.micro_batches(batch, partial(fits_in_round, tokens=8192, ranks=8)):
            lengths = [len(t.ids) for t in dpo.trajectories_of(groups)]
            held, dealt = 0, []
            for passes in schedule_rounds(lengths, 8192, 8):
                held += max(cost(indices, lengths) for indices in passes)
                dealt += sum(passes, [])
            assert sorted(dealt) == [*range(len(lengths))]
            assert held <= max(8192, *lengths)
            own += sum(lengths)
            time += 8 * held
    assert own / time > 0.78


# Fused norms.


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm])  # dtype of x * weight, and of x
@pytest.mark.parametrize("eps, scale", [(1e-6, 1.0), (1e-12, 1e4), (1.0, 1e-4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_a_fused_norm_gives_what_the_norm_gives(kind, eps, scale, dtype, x_dtype):
    torch.manual_seed(0)
    norm = kind(64, eps)
    norm.weight = torch.nn.Parameter((scale * torch.randn(64)).to(dtype))
    model = torch.nn.Sequential(torch.nn.Sequential(norm))
    x = (torch.randn(5, 64) * torch.tensor([[1e-6], [1e-3], [1.0], [10.0], [1e3]])).to(x_dtype)
    expected, names = model(x), [*model.state_dict()]
    assert models.fuse_norms(model) == 1 and [*model.state_dict()] == names
    rounding = 0.01 if torch.bfloat16 in (dtype, x_dtype) else 1e-5
    torch.testing.assert_close(model(x), expected, rtol=rounding, atol=0.0)  # dtypes, too


class OutsideRMSNorm(LlamaRMSNorm):
    """A norm that adds eps to the root, which changes only small inputs."""

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon) * self.weight


# Gemma multiplies by 1 + weight.
@pytest.mark.parametrize("kind", [OutsideRMSNorm, Gemma3RMSNorm, torch.nn.LayerNorm])
def test_a_norm_with_another_formula_is_not_fused(kind):
    assert models.fuse_norms(torch.nn.Sequential(kind(64, 1e-6))) == 0


# Compiled layers.


def test_models_that_are_loaded_later_share_the_graphs_of_compiled_layers(tmp_path, monkeypatch):
    """With and without gradients. Only the first model compiles."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    tiny_model("llama").save_pretrained(tmp_path)
    groups = batch_of(20, 31, 12)
    graphs = []

    def trained(recompute, compiles):
        model = models.read_model(tmp_path)
        models.fuse_norms(model)
        if compiles:
            models.compile_layers(model)
        models.prepare(model, recompute)
        dpo.add_references(model, groups, dpo.token_log_probs)
        [line] = dpo.train(model, dpo.adamw(model), [groups], [1e-3], dpo.sft_loss, dpo.action_count)
        return [line["loss"], line["norm"], groups[0].trajectories[0].ref_log_prob]

    for recompute in False, False, True:
        assert trained(recompute, True) == pytest.approx(trained(recompute, False), rel=1e-5)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and graphs[1] == graphs[0]


def test_without_a_compiler_layers_are_not_compiled(monkeypatch, capfd):
    def fails(function):
        raise RuntimeError("Cannot find a C compiler\nsecond line")

    monkeypatch.setattr(torch, "compile", fails)
    monkeypatch.setattr(models, "COMPILED", 1)
    models.has_compiler.cache_clear()
    one = SimpleNamespace(device=torch.device("cuda"), mixed_precision="bf16", is_main_process=True)
    model = tiny_model("llama")
    assert [models.compiles(one, model) for _ in range(2)] == [False, False]
    assert capfd.readouterr().out.count("layers are not compiled") == 1
    monkeypatch.setattr(models, "has_compiler", lambda _: True)
    assert models.compiles(one, model)
    monkeypatch.setattr(models, "COMPILED", 1_000_000_000)
    assert not models.compiles(one, model)


# The memory of a trained model is freed.


def held_when_a_model_is_read(accelerator, folder, shard):
    """Trains a model, then loads another one. Returns if weights and layers of the first one still
    exist at that time."""
    gc.disable()  # only reference counts may free it
    model = models.load(accelerator, folder, recompute=True, shard=shard)
    dpo.train(model, dpo.adamw(model), [batch_of(20)], [1e-5], dpo.sft_loss, dpo.action_count)
    things = [weakref.ref(model), weakref.ref(next(models.layers(model)[0].parameters()))]
    del model
    held, plain = [], models.read

    def reading(*what, **options):
        held.append([thing() is not None for thing in things])
        return plain(*what, **options)

    models.read = reading
    models.read_model(folder)
    return held[0]


@pytest.mark.parametrize("ranks", [1, 2])  # two ranks shard it
def test_a_trained_model_is_freed_before_the_next_model_is_loaded(ranks, tmp_path):
    make_model(50, seed=0, dtype=torch.float32).save_pretrained(tmp_path)
    assert in_ranks(ranks, held_when_a_model_is_read, tmp_path, ranks > 1) == [False, False]
