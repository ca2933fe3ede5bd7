"""What a GPU would do, without one: on a pretended card, and by counting what would be asked of it."""

import gc
import json
import math
import os
import random
import shutil
import weakref

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import in_ranks, make_model
from device_parts import parts
from pretend_gpu import compile_guard, on_card
from transformers import Qwen3Config

import coevolve
import dpo

TINY = coevolve.MODELS["tiny"]
SFT = ("--env webshop --view short --train-tasks 2 --eval-splits validation --eval-tasks 1 "
       "--sft-epochs 1 --max-tokens 420 --max-new-tokens 6").split()
RUN = [*SFT, "--iterations", "1", "--dpo-epochs", "1"]


# ------------------------------------------------------------------------ on a pretended card


@pytest.fixture(scope="session")
def guard(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("g++ makes the pretended card")
    if torch.version.cuda or torch.version.hip:
        pytest.skip("a torch with a card's own code has no place for a pretended one")
    return compile_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory):
    """A folder with a small Qwen3 of random weights."""
    folder = tmp_path_factory.mktemp("qwen3")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(params=["tiny", "qwen3"])
def model(request):
    return TINY if request.param == "tiny" else request.getfixturevalue("qwen3")


MIXED = """
import torch
on_card = torch.ones(3, device="cuda")
print((on_card + on_card).sum().item(), (on_card + torch.tensor(2.0)).tolist())
for mix in (lambda: on_card + torch.ones(3), lambda: torch.nn.functional.linear(
        torch.ones(1, 3), on_card[None]), lambda: torch.cat([torch.ones(3), on_card])):
    try:
        mix()
    except RuntimeError as error:
        print("same device" in str(error))
"""


def test_the_pretended_card_refuses_what_mixes_devices(guard):
    assert on_card(guard, MIXED).split("\n")[:4] == ["6.0 [3.0, 3.0, 3.0]", "True", "True", "True"]


def test_a_card_gives_what_the_cpu_gives(guard, model, tmp_path):
    """Load, replies with a static cache, passes in fp32 and bf16, two steps, save, trial."""
    said = on_card(guard, "import device_parts, json, sys\n"
                   "print(json.dumps(device_parts.parts(*sys.argv[1:])))",
                   "cuda:0", model, tmp_path / "card")
    found = json.loads(said.splitlines()[-1])
    wanted = json.loads(json.dumps(parts("cpu", str(model), str(tmp_path / "cpu"))))
    assert found.pop("devices") == ["cuda"] and wanted.pop("devices") == ["cpu"]
    assert found.pop("ways") == [False, False, "static"] and wanted.pop("ways") == [False, False, True]
    assert found.pop("ids") == wanted.pop("ids")
    for name, tolerance in (("half", 0.1), ("half_gradient", 0.05 * wanted["half_gradient"])):
        assert found.pop(name) == pytest.approx(wanted.pop(name), abs=tolerance)
    for name, values in wanted.items():
        for row, expected in zip(found[name], values, strict=True):
            assert row == pytest.approx(expected, abs=1e-3), name


LOOP = """
import sys
import torch
import coevolve, dpo, evolve
seen = set()
plain = dpo.token_log_probs
def noting(model, *more):
    seen.add((str(next(model.parameters()).dtype), torch.is_autocast_enabled("cuda")))
    return plain(model, *more)
dpo.token_log_probs = noting
program, *argv = sys.argv[1:]
class Run(evolve.Run):
    def play_share(self, *more):
        played = super().play_share(*more)
        for n, t in enumerate(played):  # else a model of random weights would learn nothing
            t.reward = float(n % 2)
        return played
if program == "evolve":
    coevolve.main(argv, evolve.Settings, Run, evolve.METHODS)
else:
    coevolve.main(argv)
print(sorted(seen))
"""


def test_the_method_runs_on_a_card(guard, qwen3, tmp_path):
    """In bf16 with recomputed layers, as any model but tiny does there. The first loss of SFT, of
    the same experts, is the CPU's in fp32."""
    said = on_card(guard, LOOP, "coevolve", *RUN, "--method", "eto", "--model", qwen3,
                   "--out", tmp_path / "card")
    # Passes that train are fp32 weights under autocast; the trial's are fp32 without.
    assert said.splitlines()[-1] == "[('torch.float32', False), ('torch.float32', True)]"
    phases = json.loads((tmp_path / "card/phases.json").read_text())
    assert "iter1/target-agent" in phases and "eval-1-target-validation.jsonl" in phases
    assert json.loads((tmp_path / "card/config.json").read_text())["ways"] == [
        False, False, "static"]
    coevolve.main([*SFT, "--method", "sft", "--model", str(qwen3), "--out", str(tmp_path / "cpu")])
    on_cpu = json.loads((tmp_path / "cpu/phases.json").read_text())
    assert phases["sft-target"]["first_loss"] == pytest.approx(
        on_cpu["sft-target"]["first_loss"], rel=0.01)


def test_grpo_steps_on_a_card(guard, qwen3, tmp_path):
    """There the model that trains plays as well."""
    on_card(guard, LOOP, "evolve", *"--env webshop --view short --method grpo --start-from train "
            "--train-tasks 2 "
            "--eval-splits validation --eval-tasks 1 --max-tokens 420 --max-new-tokens 6 "
            "--grpo-steps 1 --step-tasks 2 --step-rollouts 2".split(),
            "--model", qwen3, "--out", tmp_path / "run")
    phases = json.loads((tmp_path / "run/phases.json").read_text())
    assert phases["iter1/target-agent"]["steps"] > 0


WAITS = """
import sys
import pretend_gpu, torch, transformers, random
import dpo
from device_parts import WORD
folder = sys.argv[1]
encoder = dpo.Encoder(dpo.read(transformers.AutoTokenizer, folder))
model = dpo.read_model(folder, torch.bfloat16, torch.device("cuda", 0)).eval()
never = (*encoder.sampler().never, encoder.end_of_turn)
def waits(tokens, way):
    pretend_gpu.waits.clear()
    asked = [(random.Random(n).choices(WORD, k=20 + n), random.Random(n)) for n in range(4)]
    dpo.replies(model, encoder, dpo.Sampler(0.7, never), tokens, ("Observation:",), asked, False, way)
    return sum(pretend_gpu.waits.values())
for way in (True, "static"):
    waits(9, way)
    print(waits(9, way) - waits(8, way))
"""


def test_the_host_waits_three_times_a_token_at_most(guard, model):
    """For the token, for whether all rows are over, and, with a cache that grows, for whether any
    row is padded."""
    dynamic, static = map(int, on_card(guard, WAITS, model).split())
    assert dynamic <= 3 and static <= 2


# ------------------------------------------------------------------------- without any card


def test_attention_meets_new_shapes_so_cudnn_does_not_plan_it(monkeypatch, tmp_path):
    """cuDNN makes a plan for each shape that it has not met. In a small run a third and more of all
    passes have one, so plans would be made all the time, and the run switches them off."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    met, plain = [], F.scaled_dot_product_attention

    def noting(query, key, *more, **options):
        met.append((tuple(query.shape), tuple(key.shape)))
        return plain(query, key, *more, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    coevolve.main([*RUN, "--method", "eto", "--out", str(tmp_path / "run")])
    layers = dpo.read_config(TINY).num_hidden_layers
    passes = met[::layers]
    assert len(passes) > 50 and len(set(passes)) > 0.3 * len(passes)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("given, expected", [
    ({}, "expandable_segments:True"),
    (dict(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64"), "max_split_size_mb:64"),
    (dict(PYTORCH_ALLOC_CONF="max_split_size_mb:64"), None)])
def test_memory_is_taken_in_segments_that_grow(given, expected, monkeypatch, tmp_path):
    """Also without run.sh, which says it to its processes, as by `accelerate launch coevolve.py`;
    and not where the user has said something else."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # which is put back afterwards
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    coevolve.Run(*coevolve.parse([*RUN, "--out", str(tmp_path)], coevolve.Settings,
                                 coevolve.METHODS, coevolve.envs.environment, "test"))
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == expected


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
                                   MemoryError()])
def test_memory_that_lacks_is_said_in_a_line(error, monkeypatch, tmp_path):
    def lacking(*_):
        raise error

    monkeypatch.setattr(dpo, "token_log_probs", lacking)
    with pytest.raises(SystemExit, match=r"^coevolve.py: out of memory; lower --tokens-per-forward"):
        coevolve.main([*RUN, "--out", str(tmp_path)])


def busy(lengths: list[int], tokens: int, ranks: int) -> float:
    """The share of the ranks' time that goes into the trajectories' own tokens, if a round lasts as
    long as its most costly pass, and a pass costs what its longest trajectory does, times all."""
    rounds = dpo.deal(lengths, tokens, ranks)
    dealt = [place for passes in rounds for places in passes for place in places]
    assert sorted(dealt) == list(range(len(lengths)))
    time = 0
    for passes in rounds:
        costs = [len(places) * max(lengths[place] for place in places) for places in passes]
        assert len(passes) <= ranks
        assert all(cost <= tokens or len(places) == 1 for cost, places in zip(costs, passes))
        time += ranks * max(costs)
    return sum(lengths) / time


@pytest.mark.parametrize("trajectories, least", [(16, 0.78), (24, 0.8), (32, 0.8), (48, 0.8)])
def test_ranks_hardly_idle(trajectories, least):
    """Of lengths as in a shop, lognormal. Of 16 the longest is nearly twice the mean: no dealing of
    padded passes keeps eight ranks busier on the average."""
    rng = random.Random(3)
    shares = []
    for _ in range(30):
        lengths = []
        for _ in range(trajectories):
            lengths.append(int(min(4096, max(700, rng.lognormvariate(math.log(1850), 0.35)))))
        shares.append(busy(lengths, 8192, 8))
    assert sum(shares) / len(shares) > least
    assert busy([1000] * 16, 8192, 8) == 1.0


def test_one_rank_fills_its_passes_with_the_longest_first():
    rng = random.Random(0)
    for _ in range(100):
        lengths = [rng.randint(1, 900) for _ in range(rng.randint(1, 40))]
        tokens = rng.choice([0, 1, 500, 1024, 4096])
        expected = []
        for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
            longest = lengths[expected[-1][0]] if expected else math.inf
            if (len(expected[-1]) + 1 if expected else 1) * longest > tokens:
                expected.append([])
            expected[-1].append(place)
        assert dpo.deal(lengths, tokens, 1) == [[places] for places in expected]


# What trained is gone before a model is read to play.


def held_when_a_model_is_read(accelerator, folder, shard):
    """Trains a model as a phase does, and reads one that plays: whether weights and layers of the
    first are still held when the second is read."""
    held, plain = [], dpo.read

    def reading(kind, *more, **options):
        if kind is transformers.AutoModelForCausalLM:
            held.append([thing() is not None for thing in things])
        return plain(kind, *more, **options)

    def phase():
        model = dpo.load(accelerator, folder, recompute=True, shard=shard)
        t = dpo.Trajectory(ids=list(range(5, 25)), action_mask=[0] * 10 + [1] * 10)
        objective = dpo.Objective(dpo.sft_loss, lambda group: 10, 1e-5)
        steps = dpo.training(model, dpo.adamw(model, objective), [[dpo.Group([t])]], objective,
                             lambda model, some: dpo.token_log_probs(model, some))
        assert len(list(steps)) == 1
        return [weakref.ref(model), weakref.ref(next(dpo.layers(model)[0].parameters()))]

    gc.disable()  # so that it is not freed by chance
    things = phase()
    dpo.read = reading
    dpo.read_model(folder)
    dpo.read = plain
    gc.enable()
    return held


def sharded_among_pretended_ranks(accelerator, folder):
    """The same in a process that believes to be the first of eight."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    accelerator.state.num_processes = 8
    return held_when_a_model_is_read(accelerator, folder, True)


@pytest.mark.parametrize("sharded", [False, True])
def test_what_trained_is_gone_before_a_model_that_plays_is_read(sharded, tmp_path):
    make_model(50, seed=0, dtype=torch.float32).save_pretrained(tmp_path)
    if sharded:
        assert in_ranks(1, sharded_among_pretended_ranks, tmp_path) == [[False, False]]
    else:
        assert in_ranks(1, held_when_a_model_is_read, tmp_path, False) == [[False, False]]
