"""Code for GPUs, tested on a CPU: on a simulated GPU, and with the schedules of forward passes."""

import gc
import json
import math
import os
import random
import shutil
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import in_ranks, make_model
from family_models import tiny_model
from pretend_gpu import compile_guard, on_card
from transformers import Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

import coevolve
import dpo
from common.files import read_json, read_jsonl
from dpo import Group, Pair, Trajectory
from engine import models, self_check
from engine.chat import Encoder
from engine.forward_passes import distributed_log_probs, fits_in_round, schedule_rounds
from engine.machine import accelerator_of
from engine.run import Run
from engine.sampling import TokenSampler
from environments import environment

TINY = models.MODELS["tiny"]
WORDS = range(300, 2000)  # ids of words


# ------------------------------------------------------------------------- on a simulated GPU


@pytest.fixture(scope="session")
def guard(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("the simulated GPU needs g++")
    if torch.version.cuda or torch.version.hip:
        pytest.skip("the simulated GPU needs a torch without CUDA and ROCm")
    return compile_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory):
    """The folder of a small Qwen3 with random weights and grouped-query attention."""
    folder = tmp_path_factory.mktemp("qwen3")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def played(model, encoder, sampler, backend, new):
    """Returns three conversations of two replies. Their prompts differ in length."""
    asked = []
    for n, length in enumerate((30, 17, 23)):
        ids = random.Random(n).choices(WORDS, k=length)
        asked.append((Trajectory(ids=ids, action_mask=[0] * length), random.Random(n)))
    draw = TokenSampler(sampler, encoder, ("ing",))
    answer = self_check.make_generator(backend, model, draw, 3, 100, new, 64)
    for _ in range(2):
        for (t, _), (ids, log_probs) in zip(asked, answer(asked)):
            t.extend(ids, is_action=True)
            t.log_probs += log_probs
            t.extend([401, 402, 403], is_action=False)
    return [t for t, _ in asked]


def results(device: str, folder: str, out: str) -> dict:
    """Returns the results of loading, replies, forward passes, training, saving and the self-check."""
    device = torch.device(device)
    fp32, bf16 = (SimpleNamespace(num_processes=1, process_index=0, device=device,
                                   is_main_process=True, mixed_precision=kind)
                   for kind in ("no", "bf16"))
    encoder = Encoder(transformers.AutoTokenizer.from_pretrained(folder))
    found = dict(ids=[], sampled=[])
    for backend in "kv_cache", "batched":
        model = models.read_model(folder, device=device).eval()
        texts = played(model, encoder, encoder.sampler(0.7), backend, 5)
        found["ids"].append([t.ids for t in texts])
        found["sampled"].append(sum([t.log_probs for t in texts], []))

    # Train in bf16 as on a GPU: with autocast and gradient checkpointing.
    model = models.load(fp32, folder, recompute=True, shard=False)
    found["devices"] = sorted({p.device.type for p in model.parameters()})
    values = distributed_log_probs(bf16, model, texts, 100)
    values.sum().backward()
    found["half"] = values.tolist()
    found["half_gradient"] = sum(p.grad.double().norm().item() for p in model.parameters())
    model.zero_grad()

    def log_probs(model, some):
        return distributed_log_probs(fp32, model, some, 100)

    def loss(policy, groups):
        return dpo.preference_loss(policy, groups, beta=0.1)

    a, b, c = texts
    groups = [Group(texts, [Pair("a>b", a, b, 1.0, 0.5), Pair("a>b", a, c)])]
    fits = partial(dpo.fits_in_pass, tokens=200)
    dpo.add_references(model, groups, log_probs, fits)
    found["reference"] = [t.ref_log_prob for t in texts]
    lines = dpo.train(model, dpo.adamw(model), [groups] * 2, [1e-3] * 2, loss, dpo.pair_count,
                      log_probs, fits=fits)
    found["losses"] = [line["loss"] for line in lines]
    models.save(fp32, model, encoder, out)
    found["after"] = log_probs(models.read_model(out, device=device), texts).tolist()
    found["backends"] = self_check.select_backends(models.read_model(out, torch.bfloat16, device), encoder)
    return found


RESULTS = """
import json, sys, test_gpu
for folder, out in zip(sys.argv[1::2], sys.argv[2::2]):
    print("found", json.dumps(test_gpu.results("cuda:0", folder, out)))
"""


def test_a_simulated_gpu_has_the_results_of_the_cpu(guard, qwen3, tmp_path):
    """The results are replies of both backends, forward passes in fp32 and bf16, two training steps,
    the saved model, and the self-check."""
    said = on_card(guard, RESULTS, TINY, tmp_path / "tiny", qwen3, tmp_path / "qwen3")
    on = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("found ")]
    for n, (model, found) in enumerate(zip((TINY, qwen3), on, strict=True)):
        wanted = results("cpu", model, tmp_path / f"cpu{n}")
        assert (found.pop("devices"), wanted.pop("devices")) == (["cuda"], ["cpu"])
        assert wanted.pop("backends") == dict(replies="kv_cache", passes=["prefix_sharing", "padded"])
        assert found.pop("backends") == dict(replies="kv_cache", passes=["padded"])
        assert found.pop("ids") == wanted.pop("ids")
        for name, tolerance in (("half", 0.1), ("half_gradient", 0.05 * wanted["half_gradient"])):
            assert found.pop(name) == pytest.approx(wanted.pop(name), abs=tolerance)
        for values, expected in zip(found.pop("sampled"), wanted.pop("sampled"), strict=True):
            assert values == pytest.approx(expected, abs=1e-3)
        for name, values in wanted.items():
            assert found[name] == pytest.approx(values, abs=1e-3), name


MIXED = """
import sys, pretend_gpu, test_gpu, torch, transformers
from engine import models
from engine.chat import Encoder
from engine.sampling import Sampler

on_card = torch.ones(3, device="cuda")
print((on_card + on_card).sum().item(), (on_card + torch.tensor(2.0)).tolist())
for mix in (lambda: on_card + torch.ones(3), lambda: torch.nn.functional.linear(
        torch.ones(1, 3), on_card[None]), lambda: torch.cat([torch.ones(3), on_card])):
    try:
        mix()
    except RuntimeError as error:
        print("same device" in str(error))

encoder = Encoder(transformers.AutoTokenizer.from_pretrained(sys.argv[1]))
sampler = Sampler(0.7, (*encoder.sampler().suppressed_ids, encoder.end_of_turn))  # no early ends
for folder in sys.argv[1:]:
    model = models.read_model(folder, torch.bfloat16, torch.device("cuda", 0)).eval()
    test_gpu.played(model, encoder, sampler, "batched", 3)
    found = []
    for tokens in 3, 2, 3:  # the first time includes a warm-up
        pretend_gpu.waits.clear()
        test_gpu.played(model, encoder, sampler, "kv_cache", tokens)
        found.append(sum(pretend_gpu.waits.values()))
    print((found[2] - found[1]) / 2)  # for one more token in each of two turns
"""


def test_no_operation_mixes_devices_and_a_decode_step_has_one_synchronisation(guard, qwen3):
    """In it, the host gets the sampled token."""
    said = on_card(guard, MIXED, TINY, qwen3).splitlines()
    assert said[:4] == ["6.0 [3.0, 3.0, 3.0]", "True", "True", "True"]
    assert list(map(float, said[4:])) == [1, 1]  # for the token itself


RUN = """
import sys, evolve, torch
from engine import command, forward_passes
from engine.run import Run
class Paid(Run):
    def play(self, *what):
        played = super().play(*what)
        for n, t in enumerate(played):  # otherwise all rewards and advantages would be 0
            t.reward = float(n % 2)
        return played
seen = set()
plain = forward_passes.token_log_probs
def noting(model, *more):
    seen.add((str(next(model.parameters()).dtype), torch.is_autocast_enabled("cuda")))
    return plain(model, *more)
forward_passes.token_log_probs = noting
command.main(sys.argv[1:], evolve.Settings, Paid, evolve.METHODS, "a run")
print(sorted(seen))
"""


def test_a_run_on_a_gpu_trains_fp32_weights_under_autocast(guard, qwen3, tmp_path):
    """SFT and GRPO with gradient checkpointing and an inference copy. The first step of SFT has the
    loss and the gradient norm of a CPU."""
    flags = dict(view="short", train_tasks=2, eval_splits="validation", eval_tasks=1, sft_epochs=1,
                 max_tokens=420, max_new_tokens=6, model=str(qwen3))
    more = dict(start_from="train", grpo_steps=1, step_tasks=2, step_rollouts=2)
    argv = ["--method", "grpo", "--out", tmp_path / "card"]
    for name, value in (flags | more).items():
        argv += [f"--{name.replace('_', '-')}", value]
    said = on_card(guard, RUN, *argv)
    assert said.splitlines()[-1] == "[('torch.float32', True)]"
    phases = read_json(tmp_path / "card/phases.json")
    assert phases["iter1/target-agent"]["steps"] > 0 and "eval-1-target-validation.jsonl" in phases
    run = Run(coevolve.Settings(method="sft", out=str(tmp_path / "cpu"), **flags),
              environment("webshop")())
    coevolve.coevolve(run)
    card, cpu = (read_jsonl(tmp_path / name / "sft-target/train.jsonl")[0] for name in ("card", "cpu"))
    assert card["loss"] == pytest.approx(cpu["loss"], rel=0.01)
    assert card["norm"] == pytest.approx(cpu["norm"], rel=0.05)
    backends = dict(replies="kv_cache", passes=["padded"])
    assert read_json(tmp_path / "card/config.json")["backends"] == backends


# ---------------------------------------------------------------------------- on the CPU itself


@pytest.mark.parametrize("given, expected", [
    ({}, "expandable_segments:True"),
    (dict(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64"), "max_split_size_mb:64"),
    (dict(PYTORCH_ALLOC_CONF="max_split_size_mb:64"), None)])
def test_options_of_cuda(given, expected, monkeypatch):
    """Expandable segments unless the user gives another value, no cuDNN attention, and no TF32."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that the old value is restored afterwards
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cuda.matmul.allow_tf32 = True
    accelerator_of(gpu=False, bf16=False)
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == expected
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert not torch.backends.cuda.matmul.allow_tf32


def batch_of(*lengths):
    """Returns tasks with one trajectory each, of these lengths."""
    return [Group([Trajectory(task=str(n), ids=[0] * length)]) for n, length in enumerate(lengths)]


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
            rounds = schedule_rounds(lengths, 8192, 8)
            dealt = [index for passes in rounds for indices in passes for index in indices]
            assert sorted(dealt) == [*range(len(lengths))]
            held = [0] * 8
            for passes in rounds:
                costs = [len(indices) * max(lengths[n] for n in indices) for indices in passes]
                for rank, cost in enumerate(costs):
                    held[rank] += cost
                time += 8 * max(costs)
            assert max(held) <= max(8192, *lengths)
            own += sum(lengths)
    assert own / time > 0.78


# Fused norms.


@pytest.mark.parametrize("family, norms", [
    ("llama", 5), ("qwen3", 9), ("phi3", 5), ("olmo2", 9), ("gemma3_text", 0), ("gpt_neox", 0)])
def test_fused_norms_change_neither_logits_nor_gradients(family, norms):
    """The models have two layers. Gemma multiplies by 1 + weight, and GPT-NeoX has LayerNorm, so
    both keep their norms."""
    model = tiny_model(family)
    ids = torch.randint(2, 100, (2, 12), generator=torch.Generator().manual_seed(0))

    def logits_and_gradients():
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        logits.log_softmax(-1)[..., 7].sum().backward()
        return [logits, *(p.grad for p in model.parameters())]

    expected = logits_and_gradients()
    names = [*model.state_dict()]
    assert models.fuse_norms(model) == norms
    assert [*model.state_dict()] == names
    torch.testing.assert_close(logits_and_gradients(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm])  # dtype of x * weight, and of x
@pytest.mark.parametrize("eps, scale", [(1e-6, 1.0), (1e-12, 1e4), (1.0, 1e-4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_a_fused_norm_gives_what_the_norm_gives(kind, eps, scale, dtype, x_dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(kind(64, eps))
    model[0].weight = torch.nn.Parameter((scale * torch.randn(64)).to(dtype))
    x = (torch.randn(5, 64) * torch.tensor([[1e-6], [1e-3], [1.0], [10.0], [1e3]])).to(x_dtype)
    expected = model(x)
    assert models.fuse_norms(model) == 1
    rounding = 0.01 if torch.bfloat16 in (dtype, x_dtype) else 1e-5
    torch.testing.assert_close(model(x), expected, rtol=rounding, atol=0.0)  # dtypes, too


class OutsideRMSNorm(LlamaRMSNorm):
    """A norm that adds eps to the root, which changes only small inputs."""

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon) * self.weight


def test_a_norm_with_another_formula_is_not_fused():
    assert models.fuse_norms(torch.nn.Sequential(OutsideRMSNorm(64, 1e-6))) == 0


# Compiled layers.


def test_models_that_are_loaded_later_share_the_graphs_of_compiled_layers(tmp_path, monkeypatch):
    """With and without gradients. Only the first model compiles."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    tiny_model("llama").save_pretrained(tmp_path)
    groups = batch_of(20, 31, 12)
    for t in dpo.trajectories_of(groups):
        t.ids, t.action_mask = [*range(5, 5 + len(t.ids))], [1] * len(t.ids)
    graphs = []
    for recompute in False, False, True:
        plain, compiled = models.read_model(tmp_path), models.read_model(tmp_path)
        for model in plain, compiled:
            models.fuse_norms(model)
        models.compile_layers(compiled)
        found = []
        for model in plain, compiled:
            models.prepare(model, recompute)
            dpo.add_references(model, groups, dpo.token_log_probs)
            line, = dpo.train(model, dpo.adamw(model), [groups], [1e-3], dpo.sft_loss,
                              dpo.action_count)
            found.append([line["loss"], line["norm"], groups[0].trajectories[0].ref_log_prob])
        assert found[1] == pytest.approx(found[0], rel=1e-5)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and graphs[1] == graphs[0]


def test_without_a_compiler_layers_are_not_compiled(monkeypatch, capfd):
    def fails(function):
        raise RuntimeError("Cannot find a C compiler\nsecond line")

    monkeypatch.setattr(torch, "compile", fails)
    monkeypatch.setattr(models, "COMPILED", 0)
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
    held, plain = [], models.read

    def reading(*what, **options):
        held.append([thing() is not None for thing in things])
        return plain(*what, **options)

    def phase():
        model = models.load(accelerator, folder, recompute=True, shard=shard)
        batch = [Group([Trajectory(ids=list(range(5, 25)), action_mask=[0] * 10 + [1] * 10)])]
        list(dpo.train(model, dpo.adamw(model), [batch], [1e-5], dpo.sft_loss, dpo.action_count))
        return [weakref.ref(model), weakref.ref(next(models.layers(model)[0].parameters()))]

    gc.disable()  # only reference counts may free it
    things = phase()
    models.read = reading
    models.read_model(folder)
    return held[0]


@pytest.mark.parametrize("ranks", [1, 2])  # two ranks shard it
def test_a_trained_model_is_freed_before_the_next_model_is_loaded(ranks, tmp_path):
    make_model(50, seed=0, dtype=torch.float32).save_pretrained(tmp_path)
    assert in_ranks(ranks, held_when_a_model_is_read, tmp_path, ranks > 1) == [False, False]
