"""The study: statistics by hand, and a whole small one with its report."""

import fcntl
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from conftest import ended, fork, wait_until
from test_methods import OneReply
from transformers import AutoModel

from lab import mutual
from lab import play_env as envs
from lab.harness.files import RunError, read_jsonl
from lab.harness.settings import SettingsError
from lab.program import start
from lab.study import figure3, methods, numbers, runs
from lab.study import report as several
from lab.tokens import Trajectory


def test_interval_by_hand():
    """1, 2, 3, 4, 5: mean 3, variance 2.5, half width 2.776 sqrt(2.5 / 5)."""
    found = numbers.interval([1, 2, 3, 4, 5])
    assert found["n"] == 5 and found["mean"] == 3
    assert found["half"] == pytest.approx(2.7764 * math.sqrt(0.5), abs=1e-3)
    assert numbers.interval([0.5]) == dict(n=1, mean=0.5, half=None)


@pytest.mark.parametrize("a, b, mean, half, ahead, verdict", [
    # Differences 0.1, 0.2, 0.3: variance 0.01, half width 4.303 x 0.1 / sqrt(3) = 0.2484.
    ({3: .6, 4: .8, 5: 1.}, {3: .5, 4: .6, 5: .7}, 0.2, 0.2484, 3, "undecided"),
    # Differences 0.2, 0.2, 0.3: variance 1/300, half width 4.303 x 0.05774 / sqrt(3) = 0.1434.
    ({3: .7, 4: .8, 5: 1.}, {3: .5, 4: .6, 5: .7}, 7 / 30, 0.1434, 3, "ahead"),
    ({3: .5, 4: .6, 5: .7}, {3: .7, 4: .8, 5: 1.}, -7 / 30, 0.1434, 0, "behind"),
    # Only the seeds of both count: 0.2 and 0.0, half width 12.706 x 0.1.
    ({3: .7, 4: .6, 9: 0.}, {3: .5, 4: .6, 5: .7}, 0.1, 1.2706, 1, "undecided"),
])
def test_paired_differences_by_hand(a, b, mean, half, ahead, verdict):
    assert numbers.paired({3: 1.0}, {3: 0.0})["verdict"] == "undecided"  # one seed
    assert numbers.paired({3: 1.0}, {4: 0.0}) is None
    found = numbers.paired(a, b)
    assert found["mean"] == pytest.approx(mean) and found["half"] == pytest.approx(half, abs=1e-3)
    assert (found["ahead"], found["verdict"]) == (ahead, verdict)


def test_mean_distance_by_hand():
    """Unit vectors at 0, 60 and 90 degrees: cosines 1/2, 0 and cos 30; lengths do not matter."""
    vectors = np.array([[2.0, 0.0], [0.5, math.sqrt(0.75)], [0.0, 3.0]])
    assert figure3.mean_distance(vectors) == pytest.approx(1 - (0.5 + 0 + math.sqrt(0.75)) / 3)
    rows = [SimpleNamespace(task=t, reward=r, at=k, action_mask=[k < 9]) for t, r, k in (
        ("a", .5, 9), ("a", .5, 0), ("a", .5, 2), ("a", 1., 1), ("b", .5, 0), ("c", 1., 0),
        ("c", 1., 1))]
    found = figure3.distances(rows, lambda rows: [vectors[row.at] for row in rows])
    assert found == pytest.approx({"a": 1.0})


def test_the_report_says_what_survives_at_equal_cost():
    verdicts = lambda *rows: {("coevolve", b, split, "reward"): dict(verdict=verdict)
                              for b, split, verdict in rows}
    assert several.at_equal_cost(verdicts(("eto", "test", "ahead"))) == []
    assert several.at_equal_cost(verdicts(
        ("eto-steps", "test", "undecided"), ("eto", "test", "ahead"), ("eto", "unseen", "ahead"),
        ("eto-steps", "unseen", "undecided"), ("eto-tokens", "test", "behind"),
        ("positive-steps", "test", "ahead"))) == [
        ("co-evolution - ETO, equal steps",
         "ahead at equal epochs, then undecided in reward on test, reward on unseen"),
        ("co-evolution - ETO, equal tokens",
         "ahead at equal epochs, then behind in reward on test"),
        ("co-evolution - positive agent, equal steps",
         "not compared at equal epochs, then ahead in reward on test")]


def write_run(folder, *trained, **settings):
    """A run's folder with so many (steps, tokens) of the target's iterations, and no more."""
    folder.mkdir(parents=True)
    values = dict(env="webshop", method="eto", model="tiny", seed=3, hard_threshold=0.6, rollouts=2)
    (folder / "config.json").write_text(json.dumps(dict(settings={**values, **settings})))
    events = [dict(event="phase", phase=f"iter{i}/target-agent", seconds=1, steps=steps,
                   tokens=tokens) for i, (steps, tokens) in enumerate(trained, 1)]
    events += [dict(event="phase", phase=name, seconds=1, steps=100, tokens=10 ** 6)
               for name in ("sft-target", "iter1/failure-agent")]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return folder


def test_dose_and_response_by_hand(tmp_path):
    """Hard negatives count once the failure agent was trained: 0.3, 0.5 less 0.1, 0.1."""
    runs, target = {}, {}
    for method, share, reward in (("dose-k2", 0.3, 0.7), ("dose-k2-frozen", 0.1, 0.6)):
        for seed in (3, 4):
            path = runs.setdefault(method, {})[seed] = tmp_path / f"{method}-{seed}"
            path.mkdir()
            (path / "metrics.jsonl").write_text("".join(json.dumps(dict(
                event="exploration", agent=agent, iteration=i, hard_negative=hard)) + "\n"
                for agent, i, hard in (("failure", 1, 0.9), ("target", 2, 0.9),
                                       ("failure", 2, share * (seed - 2) - 0.1 * (seed - 3)),
                                       ("failure", 3, share * (seed - 2) - 0.1 * (seed - 3)))))
        target[method] = {"test": {2: dict(reward={3: reward, 4: reward + 0.1})}}
    (part,) = several._dose(runs, target, ["test"])
    ((name, hard, response),) = part.rows
    assert name == "2 rollouts" and hard["mean"] == pytest.approx((0.2 + 0.4) / 2)
    assert response["mean"] == pytest.approx(0.1) and list(part.figures) == ["dose"]


def test_methods_at_equal_cost_take_it_from_other_runs(tmp_path):
    """Co-evolution: 40 and 30 steps over 900 and 500 tokens; ETO: 20 and 10 over 600 and 400.

    So 35 steps an iteration; and 700 tokens an iteration, which ETO reads in 15 x 700 / 500 steps.
    """
    write_run(tmp_path / "coevolve-s3", (40, 900), (30, 500), method="coevolve")
    write_run(tmp_path / "eto-s3", (20, 600), (10, 400))
    evolve = write_run(tmp_path / "evolve-s3", method="evolve")
    (evolve / "metrics.jsonl").write_text("".join(
        json.dumps(dict(event="grpo", step=n, D=d)) + "\n" for n, d in enumerate((7, 7, 31), 1)))
    for method, expected in {
            "eto": "", "frozen": " --d-fail none", "eto-steps": " --dpo-steps 35",
            "eto-steps-rollouts": " --dpo-steps 35 --rollouts 4", "eto-tokens": " --dpo-steps 21",
            "positive-steps": " --dpo-steps 35", "lambda-0.5": " --lambda-sft 0.5",
            "grpo-tasks": " --start-tasks 31",
            "evolve-without-rare": " --signals forgetting,boundary"}.items():
        assert " ".join(methods.flags(method, tmp_path, 3)) == (
            f"--method {methods.method_of(method)}{expected}")
    order = [*methods.ALL]  # a run comes after those it takes from, else one job waits for ever
    assert all(order.index(other) < order.index(method)
               for method in order for other in methods.equals(method))
    assert numbers.cost(tmp_path / "coevolve-s3") == dict(
        steps_of_the_target=70, steps_of_all_agents=170, tokens_of_the_target=1400, rollouts=0)
    write_run(tmp_path / "coevolve-s4", method="coevolve")
    with pytest.raises(RunError):
        methods.flags("eto-steps", tmp_path, 4)


def test_embeddings_are_mean_states_of_action_tokens(small_model, monkeypatch):
    """Of many together, which begin alike, those that transformers gives of each alone."""
    monkeypatch.setattr(figure3, "TOKENS", 40)  # of about two of them
    rng, prompt = np.random.default_rng(0), [5, 9, 11, 7, 30, 8, 6]  # which all share
    rows, expected, model = [], [], AutoModel.from_pretrained(small_model)
    for n in (3, 30, 8, 21, 1, 13):
        ids = [*prompt, *rng.integers(5, 40, n).tolist()]
        rows.append(Trajectory(
            ids=ids, action_mask=[0] * 7 + [int(k % 3 == 0) for k in range(n)]))
        states = model(torch.tensor([ids])).last_hidden_state[0]
        expected.append(states[torch.tensor(rows[-1].action_mask) > 0].mean(0).tolist())
    found = np.stack(figure3.Embedder(small_model)(rows))
    assert np.abs(found - np.array(expected)).max() < 1e-5 < found.std()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_model):
    """A study of five methods on two seeds, in the environment of one reply; and its commands."""
    folder, commands = tmp_path_factory.mktemp("study"), []
    more = ("--train-tasks 6 --iterations 2 --max-tokens 400 --max-new-tokens 5 --slots 8 "
            "--sft-epochs 1 --sft-lr 1e-4 --dpo-epochs 1 --dpo-batch 4 --dpo-lr 1e-4 "
            f"--temperature 1.5 --rollouts 1 --model {small_model}").split()

    def launch(env, command, log):
        commands.append(command)
        assert log is None
        start.main(["--env", env, *command], mutual.loop_of)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envs, "make", lambda *_, **__: OneReply())
        patch.setattr("gc.collect", lambda: 0)
        patch.setattr(runs, "launch", launch)
        methods = ["lambda-0.1", "eto-steps-rollouts", "eto", "coevolve", "lambda-0.5"]
        runs.main(["webshop", "--jobs", "1", "--methods", *methods, "--seeds", "0", "1", "--out",
                    str(folder / "runs"), *more])
    return folder / "runs", commands


def test_a_study_runs_methods_by_seed_and_takes_steps_from_co_evolution(finished):
    folder, commands = finished
    # lambda-0.1 is the default of this model, so co-evolution itself.
    assert [c[-1].rpartition("/")[2] for c in commands] == [
        f"{m}-s{seed}" for seed in (0, 1)
        for m in ("coevolve", "eto", "eto-steps-rollouts", "lambda-0.5")]
    for seed in (0, 1):
        equal = " ".join(commands[4 * seed + 2])
        took = sum(e["event"] == "train" and e["phase"].endswith("/target-agent")
                   for e in read_jsonl(folder / f"coevolve-s{seed}" / "metrics.jsonl"))
        asked = int(re.search(r"--dpo-steps (\d+) --rollouts 2", equal)[1])
        assert asked == pytest.approx(took / 2, abs=0.5)
        sft = ["experts.jsonl", "sft-target", "eval-0-target-test.jsonl"]  # of the seed's first run
        for method, shared in (("coevolve", []), ("eto", sft), ("eto-steps-rollouts", sft), (
                "lambda-0.5", [*sft, "sft-failure", "eval-0-failure-test.jsonl"])):
            events = read_jsonl(folder / f"{method}-s{seed}/metrics.jsonl")
            assert {e["phase"]: e["reused"] for e in events if "reused" in e} == dict.fromkeys(
                shared, str(folder / f"coevolve-s{seed}"))


def test_the_report_holds_what_the_runs_hold(finished):
    folder, _ = finished
    made = json.loads((folder / "report/report.json").read_text())

    def row(title, **wanted):
        rows = next(rows for name, rows in made.items() if name.startswith(title))
        return next(r for r in rows if wanted.items() <= r.items())

    def rewards(method, name):
        return [np.mean([r["reward"] for r in read_jsonl(folder / f"{method}-s{seed}" / name)])
                for seed in (0, 1)]

    ours, eto = (rewards(m, "eval-2-target-test.jsonl") for m in ("coevolve", "eto"))
    found = row("Greedy", method="co-evolution")["test reward"]
    assert found["mean"] == pytest.approx(np.mean(ours))
    last = row("Over iterations", agent="target", method="co-evolution", iteration=2)
    assert (last["runs"], last["reward"]) == (2, found)
    pair = row("Differences", difference="co-evolution - ETO")["reward"]
    assert pair["mean"] == pytest.approx(np.mean(ours) - np.mean(eto))
    hard = {m: np.mean([0.7 <= r["reward"] < 1 for path in folder.glob(f"{m}-s?/iter*/*.jsonl")
                        if path.stem in ("target", "failure") for r in read_jsonl(path)])
            for m in ("coevolve", "eto")}
    shares = [row("Table 2", method=method, threshold=0.7)["hard negative"]["mean"]
              for method in ("co-evolution", "co-evolution - ETO")]
    assert shares == pytest.approx([hard["coevolve"], hard["coevolve"] - hard["eto"]])
    assert row("What it took", method="co-evolution")["rollouts"] == 24
    second = row("The second agents", method="co-evolution")["test reward"]["mean"]
    assert second == pytest.approx(np.mean(rewards("coevolve", "eval-2-failure-test.jsonl")))
    assert [r["lambda"] for r in made["Figure 4: lambda_SFT"]] == [0.1, 0.5]
    assert row("Figure 3", agent="ETO")["instructions"] > 0
    assert row("Co-evolution, iteration", **{"mean over seeds": "target reward"})["1"] > 0
    for name in ("curves", "figure3", "figure4"):
        assert (folder / f"report/{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (folder / f"report/{name}.svg").read_bytes().startswith(b"<?xml")
    text, page = ((folder / f"report/report.{form}").read_text() for form in ("txt", "html"))
    for said in ("co-evolution - ETO, equal steps and rollouts", "Table 2",
                 f"{found['mean']:.3f} ± {found['half']:.3f}"):
        assert said in text and said in unescape(page)
    assert page.count('src="data:image/svg+xml;base64,') == 3


@pytest.mark.parametrize("method, changed, says", [
    ("eto", dict(dpo_steps=9), "differ in dpo_steps (9, 0)"),
    ("eto-steps", dict(dpo_steps=9), None),
    ("eto-steps-rollouts", dict(rollouts=4, dpo_steps=9), None),
    ("eto-steps", dict(rollouts=4, dpo_steps=9), "differ in rollouts (4, 2)"),
    ("frozen", dict(method="coevolve", d_fail="none"), None),
    ("frozen", dict(method="coevolve", lambda_sft=0.3), "differ in lambda_sft (0.3, 0.1)"),
    ("grpo-tasks", dict(method="grpo", start_tasks=180), None),
    ("grpo", dict(method="grpo", start_tasks=180), "differ in start_tasks (180, 0)")])
def test_a_report_on_runs_of_different_settings_is_refused(tmp_path, method, changed, says):
    same = dict(lambda_sft=0.1, d_fail="all", dpo_steps=0, start_tasks=0)
    for folder, more in ((tmp_path / "eto-s3", {}), (tmp_path / f"{method}-s9", dict(changed, seed=9))):
        (write_run(folder, **{**same, **more}) / "result.json").write_text("{}")
    if says is None:
        assert {*methods.finished(tmp_path)} == {"eto", method}
        return
    with pytest.raises(RunError) as error:
        runs.main(["webshop", "--report", "--out", str(tmp_path)])
    assert says in str(error.value)


def test_a_run_that_outlived_its_study_ends_first_and_one_that_fails_is_named(tmp_path, monkeypatch, capsys):
    """The lock of the run's folder is held for a second; a refused setting shows that it began."""
    (tmp_path / "eto-s0").mkdir()
    held = open(tmp_path / "eto-s0/lock", "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    released, begun, popen = [], [], subprocess.Popen
    threading.Timer(1, lambda: (released.append(1), held.close())).start()
    monkeypatch.setattr(runs.subprocess, "Popen", lambda *args, **more: (
        begun.append(list(released)), popen(*args, **more))[1])
    log = tmp_path / "eto-s0.log"
    with pytest.raises(SettingsError, match=f"eto-s0 ended with status 2 .{log}"):
        runs.launch("webshop", ["--beta", "-1", "--out", str(tmp_path / "eto-s0")], log)
    assert "--beta -1" in log.read_text()
    assert begun == [[1]] and "study: waits for the process" in capsys.readouterr().out


@pytest.mark.parametrize("line, message", [
    ("--methods eto-steps", "add coevolve to --methods"),
    ("--methods eto-tokens coevolve", "add eto to --methods"),
    ("--report --betta 1", "unknown: --betta"),
    ("--seed 3", "--methods and --seeds"),
    ("--report", "no finished run"),
    ("--betta 1", "unknown: --betta"),
    ("--jobs 0", "--jobs 0: give 1 or more"),
])
def test_what_a_study_cannot_do_is_refused(line, message, tmp_path):
    with pytest.raises((SettingsError, RunError), match=message):
        runs.main(["webshop", *line.split(), "--out", str(tmp_path / "none")])


@pytest.fixture
def begun(monkeypatch):
    """Names of the runs that a study began, none of which is made."""
    found = []
    monkeypatch.setattr(runs, "launch",
                        lambda env, command, log: found.append(Path(command[-1]).name))
    return found


def test_what_one_method_refuses_is_said_before_any_run(begun, tmp_path):
    with pytest.raises(SettingsError, match="--explore-again"):
        runs.main(["webshop", "--explore-again", "True", "--out", str(tmp_path / "none")])
    assert not begun and not (tmp_path / "none").exists()


def test_a_study_shows_no_password(begun, tmp_path, capsys):
    runs.make_runs("intercodesql", ["sft"], [3], tmp_path, [
        "--mysql-url", "mysql://agent:canary@h:1", "--intercode-data", "d", "--model", "m"], 1)
    said = capsys.readouterr().out
    assert "--mysql-url" in said and "canary" not in said


def test_a_study_that_is_stopped_ends_its_runs(tmp_path):
    """SIGTERM, to the study alone, while two runs work: an interpreter that says so and waits."""
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\ncase $* in */requirements.py* | *version_info* | "
                      "*/settings.py*) ;; *) echo works; exec sleep 600 ;; esac")
    python.chmod(0o755)

    def work():
        sys.executable = str(python)
        sys.argv = ["runs", *f"webshop --methods sft --seeds 3 4 --jobs 2 --out {tmp_path}".split()]
        runpy.run_module("lab.study.runs", run_name="__main__")

    process, said = fork(work, tmp_path / "said"), tmp_path / "said"
    logs = [tmp_path / f"sft-s{seed}.log" for seed in (3, 4)]
    wait_until(lambda: all(log.exists() and log.read_text() == "works\n" for log in logs))
    family = psutil.Process(process).children(recursive=True)
    os.kill(process, signal.SIGTERM)
    assert ended(process) == 143 and len(family) == 2
    assert said.read_text().endswith("the same command goes on from here\n")
    assert not psutil.wait_procs(family, timeout=30)[1]


def test_runs_go_side_by_side_but_not_before_those_whose_steps_they_take(tmp_path, monkeypatch):
    two, events, fails = threading.Barrier(2), [], True

    def launch(env, command, log):
        name = Path(command[-1]).name
        events.append(f"{name} begins")
        if fails:
            two.wait(timeout=20)  # neither comes to its end alone
        if fails and name == "eto-s3":
            raise SettingsError("eto-s3 ended with status 2")
        time.sleep(0.1)
        events.append(f"{name} ends")

    monkeypatch.setattr(runs, "launch", launch)
    monkeypatch.setattr(methods, "costs",
                        lambda run: events.append(f"{run.name} is read") or dict(steps=7))
    with pytest.raises(SettingsError, match="eto-s3 ended with status 2"):
        runs.make_runs("webshop", ["coevolve", "eto", "eto-steps", "ppo"], [3, 4], tmp_path, [], 2)
    # The run that had begun came to its end, and nothing was begun any more.
    assert sorted(events) == ["coevolve-s3 begins", "coevolve-s3 ends", "eto-s3 begins"]
    events, fails = [], False
    runs.make_runs("webshop", ["coevolve", "eto-steps", "ppo"], [3, 4], tmp_path, [], 3)
    for seed in (3, 4):
        order = [events.index(e) for e in (f"coevolve-s{seed} ends", f"coevolve-s{seed} is read",
                                           f"eto-steps-s{seed} begins")]
        assert order == sorted(order)
    assert len(events) == 2 * 6 + 2
