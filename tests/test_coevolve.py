"""Pairs by hand; whole runs, repeated, killed and continued."""

import gc
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker, register_tracker_class
from conftest import ended, events, fork, fork_ranks, make_tokenizer, wait_until
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from lab import loop as coevolve
from lab import mutual
from lab import tokens as dpo
from lab.harness import files
from lab.harness.files import ROOT
from lab.harness.settings import Settings, SettingsError
from lab.look.page import make_page
from lab.program import start
from lab.training import models, pairs, trainer


def trajectory(agent, reward, rollout=0, iteration=1):
    return dpo.Trajectory(agent=agent, iteration=iteration, rollout=rollout, reward=reward)


def expert(reward=1.0):
    return trajectory("expert", reward, iteration=0)


def target(*rewards):
    return [trajectory("target", r, i) for i, r in enumerate(rewards)]


def failure(*rewards):
    return [trajectory("failure", r, i) for i, r in enumerate(rewards)]


def brief(rows):
    """(kind, chosen, rejected, weight, sft_weight); a side is agent, rollout, reward in short."""
    side = lambda x: f"{x['agent'][0]}{x['rollout']}:{x['reward']}"
    return [(r["kind"], side(r["chosen"]), side(r["rejected"]), r["weight"], r["sft_weight"])
            for r in rows]


ET, EF, FF = "expert>target", "expert>failure", "failure>failure"


@pytest.mark.parametrize("expert_reward, own, other, rows", [
    # Three pairs; the two expert pairs share a weight of 1, the failure pair has no SFT term.
    (1.0, [0.5], [0.75], [(ET, "e0:1.0", "t0:0.5", .5, .5), (EF, "e0:1.0", "f0:0.75", .5, .5),
                          (FF, "f0:0.75", "t0:0.5", 1.0, 0.0)]),
    # Equal failures make no failure pair.
    (1.0, [0.5], [0.5], [(ET, "e0:1.0", "t0:0.5", .5, .5), (EF, "e0:1.0", "f0:0.5", .5, .5)]),
    # The target succeeds: a tie with the expert, and nothing for the failure to be compared with.
    (1.0, [1.0], [0.25], [(EF, "e0:1.0", "f0:0.25", 1.0, 1.0)]),
    (1.0, [1.0], [1.0], []),
    # ETO: no failure agent.
    (1.0, [0.5], [], [(ET, "e0:1.0", "t0:0.5", 1.0, 1.0)]),
    # An expert at 0.75 is beaten by a success and by a better failure: they are the chosen ones.
    (0.75, [1.0], [0.8], [(ET, "t0:1.0", "e0:0.75", .5, .5), (EF, "f0:0.8", "e0:0.75", .5, .5)]),
    # An expert's equal is no pair, but it is a failure like any other.
    (0.75, [0.75], [0.5], [(EF, "e0:0.75", "f0:0.5", 1.0, 1.0),
                           (FF, "t0:0.75", "f0:0.5", 1.0, 0.0)]),
    # A missing rollout of the target.
    (1.0, [], [0.25], [(EF, "e0:1.0", "f0:0.25", 1.0, 1.0)]),
    # Two rollouts each, one a success: three expert pairs of weight 1/3; failures are paired
    # across the agents only.
    (1.0, [0.5, 0.25], [0.5, 1.0], [
        (ET, "e0:1.0", "t0:0.5", 1 / 3, 1 / 3), (ET, "e0:1.0", "t1:0.25", 1 / 3, 1 / 3),
        (EF, "e0:1.0", "f0:0.5", 1 / 3, 1 / 3), (FF, "f0:0.5", "t1:0.25", 1.0, 0.0)]),
])
def test_d_tgt_by_hand(expert_reward, own, other, rows):
    dropped = Counter()
    found = coevolve.d_tgt(expert(expert_reward), target(*own), failure(*other), Settings(),
                           dropped)
    assert len(found) + dropped.total() == len(own) + len(other) + len(own) * len(other)
    assert brief(found) == rows
    weights = [r["weight"] for r in found if r["kind"] != FF]
    assert not weights or sum(weights) == pytest.approx(1.0)


def test_d_tgt_settings():
    pairs = lambda own, other, reward=1.0, **changed: brief(coevolve.d_tgt(
        expert(reward), target(own), failure(other), replace(Settings(), **changed), Counter()))
    assert pairs(1.0, 0.5, 0.75, expert_beaten="drop") == [(EF, "e0:0.75", "f0:0.5", 1.0, 1.0)]
    assert [r[3] for r in pairs(0.5, 0.25, pair_weights="none")] == [1.0, 1.0, 1.0]
    assert [r[0] for r in pairs(0.5, 0.25, d_tgt_failures="none")] == [ET, EF]
    assert [r[0] for r in pairs(0.5, 0.25, d_tgt_failures="hard")] == [ET, EF]
    assert [r[0] for r in pairs(0.6, 0.25, d_tgt_failures="hard")] == [ET, EF, FF]


@pytest.mark.parametrize("own, other, rows", [
    ([0.5], [0.75], ["f0:0.75>t0:0.5"]),
    ([0.5], [0.5], []),
    ([1.0], [0.5], []),                       # a success is no failure
    ([], [0.5], []),
    ([0.5, 0.25], [0.75, 1.0], ["t0:0.5>t1:0.25", "f0:0.75>t0:0.5", "f0:0.75>t1:0.25"]),
])
def test_d_fail_by_hand(own, other, rows):
    found = brief(coevolve.d_fail(target(*own), failure(*other), [], Settings(), Counter()))
    assert [f"{w}>{l}" for _, w, l, _, _ in found] == rows
    assert all((kind, weight, sft) == (FF, 1.0, 0.0) for kind, _, _, weight, sft in found)


def test_d_fail_settings():
    own, other = target(0.5, 0.25), failure(0.75)
    settings = replace(Settings(), d_fail="cross")
    cross = brief(coevolve.d_fail(own, other, [], settings, Counter()))
    assert [(w, l) for _, w, l, _, _ in cross] == [("f0:0.75", "t0:0.5"), ("f0:0.75", "t1:0.25")]
    old = [trajectory("target", 0.1)]
    settings = replace(Settings(), d_fail="buffer")
    buffer = brief(coevolve.d_fail(own[:1], other, old, settings, Counter()))
    assert {(w, l) for _, w, l, _, _ in buffer} == {
        ("f0:0.75", "t0:0.5"), ("t0:0.5", "t0:0.1"), ("f0:0.75", "t0:0.1")}


def test_cut_keeps_whole_turns():
    mask = [0, 0, 1, 1, 0, 1, 0, 0, 1, 1]
    whole = dpo.Trajectory("task", "target", ids=list(range(10)), action_mask=mask, reward=0.5,
                           ended="done")
    first = lambda n: replace(whole, ids=whole.ids[:n], action_mask=mask[:n], ended="budget")
    assert pairs.cut(whole, None) == whole
    assert pairs.cut(whole, 1) == first(4)
    assert pairs.cut(whole, 2) == first(6)
    assert pairs.cut(whole, 3) == pairs.cut(whole, 9) == whole


def flags(out, *more):
    """A quick run made quicker: what is tested here is that it all fits together."""
    return ["--quick", "--rollouts", "1", "--iterations", "1", "--train-tasks", "16", "--eval-tasks",
            "2", "--sft-epochs", "3", "--sft-batch", "4", "--dpo-batch", "8", "--seed", "5",
            "--threads", "1", "--checkpoint-minutes", "0", "--out", str(out), *more]


def running(out, *more, page=None):
    """What does such a run, in a process of its own."""
    return lambda: start.start(["--env", "webshop", *flags(out, *more)], mutual.loop_of, page)


def finish(out, *more, page=None):
    """What such a run prints."""
    said = out.parent / f"{out.name}.said"
    said.unlink(missing_ok=True)
    assert ended(fork(running(out, *more, page=page), said)) == 0, said.read_text()[-3000:]
    assert "\r" not in said.read_text()  # no moving bar in a log
    return said.read_text()


def contents(run):
    """Every file of a run by name, without what tells the time or where it is."""
    files = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.is_file() and name not in ("lock", "config.json", "phases.json", "curves.png",
                                            "curves.svg", "run.html"):
            files[name] = path.read_bytes()
    logged = [json.loads(line) for line in files.pop("metrics.jsonl").splitlines()]
    for event in logged:
        for timing in ("seconds", "tokens_per_second", "resident_mb"):
            event.pop(timing, None)
    return files, logged


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    out = tmp_path_factory.mktemp("quick") / "run"
    return out, finish(out, page=make_page)


def test_a_quick_run_makes_the_files_of_the_contract(quick):
    out, printed = quick
    settings = json.loads((out / "config.json").read_text())["settings"]
    assert settings["quick"] and settings["seed"] == 5 and "target" in printed
    for name in ("result.json", "curves.png", "run.html", "sft-target/model.safetensors",
                 "sft-failure/tokenizer.json", "iter1/target-agent/config.json",
                 "iter1/failure-agent/model.safetensors", "eval-1-target-test.jsonl"):
        assert (out / name).exists(), name
    fields = {"task", "agent", "iteration", "rollout", "seed", "messages", "ids", "action_mask",
              "reward", "steps", "cut_replies", "ended"}
    trajectories = {}
    for name, agent in (("experts", "expert"), ("iter1/target", "target"),
                        ("iter1/failure", "failure")):
        for row in files.read_jsonl(out / f"{name}.jsonl"):
            assert set(row) == fields and row["agent"] == agent
            assert len(row["ids"]) == len(row["action_mask"])
            assert row["steps"] == sum(m["role"] == "assistant" for m in row["messages"])
            trajectories[row["task"], agent] = row
    tasks = {task for task, _ in trajectories}
    assert len(trajectories) == 3 * len(tasks) == 3 * settings["train_tasks"]
    # The pairs of the file are those of Eq. (6) and (8), counted here from the rewards alone.
    expected = Counter()
    for task in tasks:
        e, t, f = (trajectories[task, agent]["reward"] for agent in ("expert", "target", "failure"))
        expected["target", ET] += e != t
        expected["target", EF] += e != f
        for trains in ("target", "failure"):
            expected[trains, FF] += t != f and t < 1 and f < 1
    found = Counter()
    for trains in ("target", "failure"):
        for row in files.read_jsonl(out / f"iter1/pairs-{trains}.jsonl"):
            found[row["trains"], row["kind"]] += 1
            assert row["chosen"]["reward"] > row["rejected"]["reward"]
    assert found == expected and len(expected) == 4 and all(expected.values()), expected
    first = events(out, "train", phase="iter1/failure-agent")[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4)


def test_a_killed_run_goes_on_inside_the_phase_to_the_same_result(quick, tmp_path):
    """SIGKILL between the renaming of its first output and its recording; in the middle of SFT;
    and in the middle of the target's preference training."""
    out = tmp_path / "run"
    out.mkdir()
    for name in ("config.json", "experts.jsonl"):
        shutil.copy(quick[0] / name, out / name)
    with pytest.raises(SettingsError, match="no phases.json"):
        start.main(flags(out), mutual.loop_of)
    gc.collect()  # releases the folder
    (out / "phases.json").write_text("{}")
    for phase, before, step in (
            ("sft-target", "experts.jsonl", 4), ("iter1/target-agent", "iter1/failure-agent", 2)):
        process = fork(running(out), tmp_path / "said")
        wait_until(lambda: f'"{before}"' in (out / "phases.json").read_text() and any(
            int(p.name[5:]) >= step for p in out.glob("checkpoint/step-*")))
        os.kill(process, signal.SIGKILL)
        ended(process)
        assert f'"{phase}"' not in (out / "phases.json").read_text()
    assert "iter1/target-agent went on after step" in finish(out)
    assert contents(out) == contents(quick[0])
    assert "was finished before" in finish(out)
    assert contents(out) == contents(quick[0])


def test_gpus_that_torch_cannot_use_are_not_passed_over(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SettingsError, match="2 GPUs are here, but torch"):
        models.make_accelerator(Settings(model="org/large"))
    models.make_accelerator(Settings())
    models.make_accelerator(Settings(method="chat", model="http://h/v1"))


def test_a_hub_name_runs_from_the_cache(small_model, tmp_path):
    """A cache as the hub's client keeps it, and no network; the commit identifies the model."""
    commit, repo = "0123456789abcdef0123456789abcdef01234567", tmp_path / "hub/models--org--small"
    shutil.copytree(small_model, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(commit)
    command = [sys.executable, str(ROOT / "lab/loop.py"), "--model", "org/small", "--view", "short",
               "--method", "evaluate", "--eval-tasks", "1", "--eval-splits", "test",
               "--max-tokens", "1200", "--max-new-tokens", "2", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={
        **os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "run/config.json").read_text())["base"] == f"org/small {commit}"


def test_a_folder_like_the_hubs_runs_the_whole_loop(tmp_path):
    """Llama's template, tied weights stored in bf16: SFT at lr 1e-6 moves them and loses nothing."""
    tokenizer, hub_folder = make_tokenizer("llama2"), tmp_path / "model"
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer) + 3, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=4096, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True)).to(
            torch.bfloat16).save_pretrained(hub_folder)
    tokenizer.save_pretrained(hub_folder)
    finish(tmp_path / "run", "--model", str(hub_folder), "--train-tasks", "4", "--eval-tasks", "1",
           "--eval-splits", "test", "--sft-epochs", "1", "--max-tokens", "4096",
           "--max-new-tokens", "8",
           "--sft-lr", "1e-6", "--sft-batch", "2", "--dpo-lr", "1e-3")
    rows = [json.loads(line) for line in (tmp_path / "run/iter1/target.jsonl").open()]
    assert {row["steps"] for row in rows} == {10}  # it never finds the shop's actions
    assert all(len(row["ids"]) == len(row["action_mask"]) for row in rows)
    before, after = (load_file(folder / "model.safetensors")
                     for folder in (hub_folder, tmp_path / "run/sft-target"))
    assert before.keys() == after.keys()
    for name, weights in after.items():
        assert before[name].dtype == torch.bfloat16 and weights.dtype == torch.float32
        if ".layers." in name:
            changed = (weights != before[name].float()).float().mean()
            assert changed > 0.99, name
            assert (weights.bfloat16() != before[name]).float().mean() < 0.5  # bf16 would lose it


def test_two_sharded_processes_train_like_one(quick, tmp_path):
    said = tmp_path / "said"
    started = fork_ranks(2, running(tmp_path / "run", "--method", "eto", "--shard", "on"), said)
    assert [ended(process) for process in started] == [0, 0], said.read_text()[-3000:]
    assert "2 processes on cpu, weights sharded" in said.read_text()
    runs = quick[0], tmp_path / "run"
    assert runs[1].joinpath("experts.jsonl").read_bytes() == (
        runs[0].joinpath("experts.jsonl").read_bytes())
    losses = [[e["loss"] for e in events(run, "train", phase="sft-target")] for run in runs]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5) and len(losses[0]) > 5
    played = [[(r["task"], r["seed"]) for r in files.read_jsonl(run / "iter1/target.jsonl")]
              for run in runs]
    assert played[0] == played[1]


def test_a_tracker_gets_every_number_of_the_log(tmp_path):
    """A tracker of accelerate's own kind, which keeps what it is given."""
    given = []

    class Recorder(GeneralTracker):
        name, requires_logging_directory, main_process_only, tracker = "recorder", False, True, None

        def __init__(self, run_name, **more):
            super().__init__()

        def store_init_configuration(self, values):
            given.append(values)

        def log(self, values, step, **more):
            given.append((step, values))

    register_tracker_class(Recorder)
    start.main(flags(tmp_path / "run", "--method", "sft", "--track", "recorder"), mutual.loop_of)
    config, *logged = given
    assert config["method"] == "sft"
    for event, (step, values) in zip(files.read_jsonl(tmp_path / "run/metrics.jsonl"), logged,
                                     strict=True):
        if event["event"] == "train":
            assert step == event["step"] and values["train/sft-target/loss"] == event["loss"]
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("broken, message", [
    ("disk", "GB are free, and the run's checkpoints take 0.0"),
    ("weights", "saved and loaded again, model.embed_tokens.weight is not"),
    ("tokenizer", "saved and loaded again, its tokenizer is not the same"),
])
def test_what_cannot_be_saved_is_known_before_the_first_step(quick, tmp_path, monkeypatch, broken,
                                                             message):
    """A full disk, weights that change on the way, a tokenizer that loses a token."""
    save = trainer.Trainer.save
    if broken == "disk":
        monkeypatch.setattr(trainer.shutil, "disk_usage",
                            lambda path: type("Usage", (), dict(free=1000)))

    def save_badly(self, model, before, out):
        saved = save(self, model, before, out)
        if broken == "weights":
            weights = load_file(out / "model.safetensors")
            weights["model.embed_tokens.weight"] += 1e-3
            save_file(weights, out / "model.safetensors", {"format": "pt"})
        if broken == "tokenizer":
            text = (out / "tokenizer.json").read_text()
            (out / "tokenizer.json").write_text(text.replace('"find"', '"fin_d"'))
        return saved

    monkeypatch.setattr(trainer.Trainer, "save", save_badly)
    with pytest.raises(SettingsError) as refusal:
        start.main(flags(tmp_path / "run"), mutual.loop_of)
    AcceleratorState._reset_state(True)
    assert message in str(refusal.value)
    assert not events(tmp_path / "run", "train")


@pytest.mark.parametrize("tracker", ["wandb", "wandbb"])
def test_a_tracker_that_is_not_there_is_refused(tmp_path, tracker):
    if importlib.util.find_spec(tracker):
        pytest.skip(f"{tracker} is installed")
    with pytest.raises(SettingsError, match=f"--track {tracker}: "):
        start.main(flags(tmp_path / "run", "--track", tracker), mutual.loop_of)
    assert not (tmp_path / "run").exists()
