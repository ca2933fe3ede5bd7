"""The dry run's numbers against torch's allocator, hand-worked sizes and real folders."""

import json
import re

import fake_gpu
import pytest
import torch
from conftest import ended, fork, make_tokenizer, peak
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Qwen3Config

from lab import mutual
from lab import play_env as envs
from lab import tokens as dpo
from lab.bench import bench, gpu
from lab.engine import cache, sharding
from lab.harness.settings import SettingsError, parse
from lab.program import dry_run, start

QWEN = dict(vocab_size=500, hidden_size=64, intermediate_size=160, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, num_hidden_layers=2, max_position_embeddings=4096)
MODELS = fake_gpu.MODELS | dict(
    small=(Qwen3Config, QWEN),
    wide=(Qwen3Config, QWEN | dict(vocab_size=32000, hidden_size=8192, intermediate_size=69720,
                                   num_attention_heads=64)))  # 4.02e9 numbers in two layers


def model_of(layers, fake):
    config = Qwen3Config(**QWEN | dict(num_hidden_layers=layers))
    make = lambda: AutoModelForCausalLM.from_config(  # noqa: E731
        config, dtype=torch.float32, attn_implementation="ragged")
    if not fake:
        return make()
    with FakeTensorMode():
        return make()


def sequences(*lengths):
    return [dpo.Trajectory(ids=[k] * n, action_mask=[0] * (n // 2) + [1] * (n - n // 2))
            for k, n in enumerate(lengths)]


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_equal_what_the_allocator_gave_out(recompute):
    planned = dry_run.activations(model_of(3, fake=True), sequences(400, 300), recompute)
    model = model_of(3, fake=False)
    if recompute:
        sharding.recompute_layers(model)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    took = peak(lambda: dpo.action_log_probs(model.train(), sequences(400, 300)).sum().backward())
    assert planned == pytest.approx(took, rel=0.1)


def test_a_slot_holds_keys_and_values_of_every_layer():
    """Qwen3-4B: 36 layers, 8 heads of 128, keys and values, 2 bytes: 147,456 bytes a token."""
    assert cache.slot_bytes(Qwen3Config(num_hidden_layers=36, num_attention_heads=32, head_dim=128,
                                       num_key_value_heads=8)) == 147_456
    model = model_of(3, fake=False).to(torch.bfloat16)
    assert cache.SlotCache(model, 5, 128).kv.nbytes == 640 * cache.slot_bytes(model.config)


@pytest.fixture
def folder(tmp_path):
    """folder(name): a hub folder of that model's size, without weights."""
    def make(name):
        kind, sizes = MODELS[name]
        kind(architectures=[kind.__name__.replace("Config", "ForCausalLM")],
             **dict(max_position_embeddings=4096) | sizes).save_pretrained(tmp_path)
        make_tokenizer("llama2" if name == "llama2-7b" else "chatml").save_pretrained(tmp_path)
        return str(tmp_path)
    return make


def plan_of(folder, machine, *more):
    s = parse(["--env", "webshop", "--model", folder, "--dry-run", machine, *more])
    return dry_run.dry_run(s)


def test_the_papers_models_fit_eight_gpus_and_a_7b_model_not_one(folder, capsys):
    """7B: 6.74e9 parameters x 16 bytes / 8 GPUs = 13.5 GB; alone 108 GB, more than an H100 has."""
    llama = folder("llama2-7b")
    plan_of(llama, "8xH100")
    printed = capsys.readouterr().out
    assert "6.74 B parameters on 8 x H100; sharded, with gradient checkpointing" in printed
    for part, size in (("weights, fp32", 3.4), ("gradients, fp32", 3.4),
                       ("Adam's moments, fp32", 6.7), ("bf16 replica", 13.5),
                       ("cache of 32 slots", 68.7)):  # 32 x 4,096 x 32 layers x 2 x 4,096 x 2
        line = next(line for line in printed.splitlines() if line.startswith(part))
        assert line.split()[-1] == str(size)
    # One rank reads 4 x 6.74e9 bytes. 5% of 27 minutes are the 81 s that 12 x 6.74e9 take.
    assert "beside the programs: 27.0 GB, by the first rank" in printed
    assert "one of 80.9 GB every 10 minutes" in printed and "81 s, so every 27 min" in printed
    # 0.8 x (0.92 x 84.8 - 13.5) GB hold 24 of 2.147 GB.
    assert "32 slots do not fit beside the replica: 24 will be used" in printed
    with pytest.raises(SettingsError, match=r"training takes \d+\.\d GB of 84\.8; use more GPUs"):
        plan_of(folder("wide"), "1xH100")  # 64 GB and a pass
    plan_of(folder("qwen3-4b"), "1xH200")
    assert "4.02 B parameters on 1 x H200" in capsys.readouterr().out


def test_a_buffer_of_failures_is_planned_for_as_it_is_in_the_last_iteration(folder, capsys):
    """Three iterations of two rollouts: six trajectories in a pass, so three on each of two GPUs,
    and 1 + 2 + 3 times two read; without it an expert and two, and three times two."""
    small, read = folder("small"), {}
    for d_fail, tokens in (("all", 2 * 4096), ("buffer", 3 * 4096)):
        plan_of(small, "2xH100", "--iterations", "3", "--d-fail", d_fail, "--tokens-per-forward", "99")
        printed = capsys.readouterr().out
        assert f"activations of {tokens:,} tokens" in printed
        read[d_fail] = float(re.search(r"preferences +([\d.]+) M", printed)[1])
    assert read["buffer"] / read["all"] == pytest.approx((3 * 3 + 12) / (3 * 3 + 6), rel=1e-2)


def test_what_explores_again_and_steps_that_are_asked_for_are_planned(folder, tmp_path, capsys,
                                                                     monkeypatch):
    """Two agents of one rollout each, and the failure agent once more; a step of 32 pairs reads 64
    trajectories, and the failure agent's epochs two a task as before. One process prints it."""
    small, tokens = folder("small"), {}
    common = ["--model", small, "--dry-run", "8xH100", "--rollouts", "1", "--dpo-epochs", "1",
              "--iterations", "1", "--train-tasks", "100", "--out", str(tmp_path / "run")]
    for flags in ((), ("--explore-again", "true"), ("--dpo-steps", "10")):
        start.main([*common, *flags], mutual.loop_of)
        printed = capsys.readouterr().out
        tokens[flags[:1]] = [float(re.search(rf"{name} +([\d.]+) M", printed)[1])
                             for name in ("exploration", "preferences")]
    (explored, read), (again, _), (_, steps) = tokens.values()
    assert again / explored == pytest.approx(3 / 2, rel=0.3)  # printed in tenths
    assert steps / read == pytest.approx((10 * 32 * 2 + 200) / (300 + 200), rel=0.3)
    monkeypatch.setenv("RANK", "1")
    start.main(common, mutual.loop_of)
    assert capsys.readouterr().out == "" and not (tmp_path / "run").exists()


def test_the_second_system_holds_two_policies_and_plays_between_steps(folder, capsys):
    """3 steps in segments of 2, so 2 segments: 400 tasks x 6 episodes a step; 6 x 1,000
    before, 2 kinds x 500 picks x 3 between them. The model has 4.02e9 parameters."""
    wide, flags = folder("wide"), (
        "--method evolve --step-tasks 400 --step-rollouts 6 --grpo-steps 3 --evolve-every 2 "
        "--start-tasks 1000 --signals forgetting,rare --picks 500 --explorer-episodes 3").split()
    plan_of(wide, "8xH100", *flags)
    printed = capsys.readouterr().out
    rows = {line[:42].rstrip(): line[42:].split() for line in printed.splitlines()}
    for part in ("weights, fp32", "the first policy, fp32"):  # 4 x 4.02 / 8
        assert rows[part] == ["2.0", "2.0"]
    assert rows["Adam's moments, fp32"] == ["4.0", "4.0"] and rows["bf16 replica"] == ["8.0"]
    assert "activations of 16,384 tokens" in printed
    tokens = {name: float(re.search(rf"{name} +([\d.]+) M", printed)[1])
              for name in ("exploration", "rollouts", "GRPO")}
    assert tokens["rollouts"] == tokens["GRPO"]
    assert tokens["exploration"] / tokens["rollouts"] == pytest.approx((6000 + 3000) / 7200, rel=2e-2)
    # The SFT agent, and two of GRPO with two moments: 4 x 4.02 x 7 GB.
    assert "disk: 113 GB of agents" in printed

    plan_of(wide, "8xH100", *flags, "--method", "grpo", "--start-from", "train", "--start-tasks", "40",
            "--warm-start", "none")
    printed = capsys.readouterr().out
    assert re.search(r"exploration +0\.0 M", printed) and "\nSFT " not in printed
    few = float(re.search(r"rollouts +([\d.]+) M", printed)[1])
    assert few / tokens["rollouts"] == pytest.approx(40 / 400, rel=2e-2)


@pytest.mark.parametrize("machine", ["8xB9000", "8", "x"])
def test_an_unknown_machine_is_refused(folder, machine):
    with pytest.raises(SettingsError, match=f"'{machine}' is no machine; name one"):
        plan_of(folder("small"), machine)


def test_what_a_run_would_refuse_is_not_planned(folder, tmp_path, capsys):
    """On a server nobody makes tasks, it has 500 test goals, and experts of these are not tested."""
    turns = [dict(role=r, content=c) for r, c in (("user", "a [SEP] b"), ("assistant", "search[a]"))]
    for goal, file in ((3000, "experts"), (7, "tested")):
        (tmp_path / file).write_text(json.dumps(
            dict(task=f"webshop-train-{goal}", messages=turns, reward=1.0)) + "\n")
    server = ["--webshop-url", "http://127.0.0.1:9", "--experts"]
    qwen, experts = folder("small"), str(tmp_path / "experts")
    for flags, message in (
            ((experts, "--method", "evolve"), "nobody makes new tasks"),
            ((experts, "--eval-tasks", "501"), "webshop has 500 test tasks"),
            ((str(tmp_path / "tested"),), "1 of 500 evaluated tasks are also trained on")):
        with pytest.raises((SettingsError, envs.Refused), match=message):
            plan_of(qwen, "8xH100", *server, *flags)
    capsys.readouterr()
    plan_of(qwen, "8xH100", *server, experts)
    assert capsys.readouterr().out.startswith("webshop: 1 experts from ")


def test_the_gpu_script_runs_its_path_anywhere(tmp_path):
    out, said = tmp_path / "gpu.jsonl", tmp_path / "said"
    process = fork(lambda: gpu.main(["--small", "--out", str(out)]), said)
    assert ended(process) == 0, said.read_text()
    lines, said = out.read_text().splitlines(), said.read_text()
    rows = {what: value for _, what, value in map(json.loads, lines)}
    assert len(rows) == len(lines) == len(said.splitlines()) == 7
    assert rows["device"] in said and rows["training, tokens/s"] in said


def test_operations_of_a_pass_by_hand():
    # Per layer q, k, v, o of 192 x 192 and three matrices of 192 x 512; 4 layers; 2 a multiply-add.
    weights = 4 * (4 * 192 * 192 + 3 * 192 * 512)
    # Of 3 tokens one sees 1, one 2, one 3; scores and sums of values, 192 wide, in 4 layers.
    attention = 4 * 2 * 192 * (1 + 2 + 3)
    assert gpu.forward_flops(bench.make_model("sdpa"), 3, 1 + 2 + 3, 2) == 2 * (
        3 * weights + attention + 2 * 192 * 2048)


def test_both_sections_compare_the_same_work(capsys):
    bench.main(["--quick"])
    said = capsys.readouterr().out
    assert "train step, 1/7" in said and "train step, 1/2" in said and "rollout, 4 slots" in said
