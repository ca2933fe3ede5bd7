"""What a GPU would do, without one: on a pretended card, and by counting what would be asked of it."""

import json
import shutil

import pytest
import torch
import transformers
from device_parts import parts
from pretend_gpu import compile_guard, on_card
from transformers import Qwen3Config

import coevolve

TINY = coevolve.MODELS["tiny"]
RUN = ("--env webshop --view short --train-tasks 2 --eval-splits validation --eval-tasks 1 "
       "--iterations 1 --sft-epochs 1 --dpo-epochs 1 --max-tokens 420 --max-new-tokens 6").split()


# ------------------------------------------------------------------------ on a pretended card


@pytest.fixture(scope="session")
def guard(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("g++ makes the pretended card")
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
module, *argv = sys.argv[1:]
{"coevolve": coevolve, "evolve": evolve}[module].main(argv)
print(sorted(seen))
"""


def test_the_method_runs_on_a_card(guard, qwen3, tmp_path):
    """In bf16 with recomputed layers, as any model but tiny does there. The first loss of SFT, of
    the same experts, is the CPU's in fp32."""
    def go(out):
        return [*RUN, "--model", str(qwen3), "--method", "eto", "--out", str(out)]

    said = on_card(guard, LOOP, "coevolve", *go(tmp_path / "card"))
    # Passes that train are fp32 weights under autocast; the trial's are fp32 without.
    assert said.splitlines()[-1] == "[('torch.float32', False), ('torch.float32', True)]"
    phases = json.loads((tmp_path / "card/phases.json").read_text())
    assert "iter1/target-agent" in phases and "eval-1-target-validation.jsonl" in phases
    assert json.loads((tmp_path / "card/config.json").read_text())["ways"] == [
        False, False, "static"]
    coevolve.main([*go(tmp_path / "cpu"), "--method", "sft"])
    on_cpu = json.loads((tmp_path / "cpu/phases.json").read_text())
    assert phases["sft-target"]["first_loss"] == pytest.approx(
        on_cpu["sft-target"]["first_loss"], rel=0.01)


def test_grpo_steps_on_a_card(guard, qwen3, tmp_path):
    """There the model that trains plays as well."""
    on_card(guard, LOOP, "evolve", *"--env webshop --view short --method grpo --train-tasks 2 "
            "--eval-splits validation --eval-tasks 1 --max-tokens 420 --max-new-tokens 6 "
            "--grpo-steps 1 --step-tasks 2 --step-rollouts 2".split(),
            "--model", qwen3, "--out", tmp_path / "run")
    phases = json.loads((tmp_path / "run/phases.json").read_text())
    assert "iter1/target-agent" in phases


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
