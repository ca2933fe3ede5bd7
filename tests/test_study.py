"""The study: statistics by hand, and a whole small one with its report."""

import json
import math
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from conftest import ended, fork, wait_until
from test_report import trajectory, write_lines, write_run
from transformers import AutoModel

from common.settings import Refused
from lab.study import compare, numbers, study
from lab.study import methods as study_methods


@pytest.mark.parametrize("a, b, mean, half, ahead, sure", [
    # Differences 0.1, 0.2, 0.3: variance 0.01, half width 4.303 x 0.1 / sqrt(3) = 0.2484.
    ({3: .6, 4: .8, 5: 1.}, {3: .5, 4: .6, 5: .7}, 0.2, 0.2484, 3, False),
    # Differences 0.2, 0.2, 0.3: variance 1/300, half width 4.303 x 0.05774 / sqrt(3) = 0.1434.
    ({3: .7, 4: .8, 5: 1.}, {3: .5, 4: .6, 5: .7}, 7 / 30, 0.1434, 3, True),
    ({3: .5, 4: .6, 5: .7}, {3: .7, 4: .8, 5: 1.}, -7 / 30, 0.1434, 0, True),
    # Only the seeds of both count: 0.2 and 0.0, half width 12.706 x 0.1.
    ({3: .7, 4: .6, 9: 0.}, {3: .5, 4: .6, 5: .7}, 0.1, 1.2706, 1, False),
    # 1, 2, 3, 4, 5: variance 2.5, half width 2.776 sqrt(2.5 / 5).
    (dict(enumerate(range(1, 6))), dict.fromkeys(range(5), 0), 3, 1.9632, 5, True),
])
def test_paired_differences_by_hand(a, b, mean, half, ahead, sure):
    assert not numbers.paired({3: 1.0}, {3: 0.0})["sure"]  # one seed
    assert numbers.paired({3: 1.0}, {4: 0.0}) is None
    found = numbers.paired(a, b)
    assert found["mean"] == pytest.approx(mean) and found["half"] == pytest.approx(half, abs=1e-3)
    assert (found["ahead"], found["sure"]) == (ahead, sure)


def test_mean_distance_by_hand():
    """Unit vectors at 0, 60 and 90 degrees: cosines 1/2, 0 and cos 30; lengths do not matter."""
    vectors = np.array([[2.0, 0.0], [0.5, math.sqrt(0.75)], [0.0, 3.0]])
    assert numbers.mean_distance(vectors) == pytest.approx(1 - (0.5 + 0 + math.sqrt(0.75)) / 3)
    rows = [dict(task=t, reward=r, at=k, action_mask=[k < 9]) for t, r, k in (
        ("a", .5, 9), ("a", .5, 0), ("a", .5, 2), ("a", 1., 1), ("b", .5, 0), ("c", 1., 0),
        ("c", 1., 1))]
    found = numbers.distances(rows, lambda row: vectors[row["at"]], 1.0)
    assert found == pytest.approx({"a": 1.0})


def trained_run(folder, *taken, **settings):
    """A run's folder with so many (steps, tokens) of the target's iterations, and no more."""
    phases = {name: dict(work="train", steps=100, tokens=10 ** 6, seconds=1.0, name=agent)
              for name, agent in (("sft-target", "target"), ("iter1/failure-agent", "failure"))}
    phases |= {f"iter{i}/target-agent": dict(work="train", steps=steps, tokens=tokens,
                                             seconds=1.0, name="target")
               for i, (steps, tokens) in enumerate(taken, 1)}
    return write_run(folder, phases, **{**dict(method="eto", seed=3), **settings})


def test_tokens_that_were_not_counted_are_not_zero(tmp_path):
    """The plain core counts none; an agent that was not trained read none."""
    counted = trained_run(tmp_path / "a", (40, 900), (30, 500))
    plain = trained_run(tmp_path / "b", (20, 600), (10, 400), seed=4)
    still = trained_run(tmp_path / "c", (20, 600), (0, 0))
    for run in plain, still:
        phases = json.loads((run / "phases.json").read_text())
        del phases["iter2/target-agent"]["tokens"]
        (run / "phases.json").write_text(json.dumps(phases))
    for run in counted, plain, still:
        (run / "result.json").touch()
    found = [numbers.cost(run)["tokens_of_the_target"] for run in (counted, plain, still)]
    assert found == [1400, None, 600]
    runs = dict(counted={3: counted}, plain={3: counted, 4: plain}, still={3: still})
    _, (_, heads, rows), *_ = compare.tables(runs, dict(zip(runs, runs)), [], [], [])
    told = {row[0]: dict(zip(heads.split()[1:], map(compare.cell, row[1:]))) for row in rows}
    assert [told[name]["tokens_of_the_target"] for name in runs] == ["1,400", "-", "600"]
    assert told["plain"]["steps_of_the_target"] == "50"


def test_methods_at_equal_cost_take_it_from_other_runs(tmp_path):
    """Co-evolution takes 40 and 30 steps, 35 an iteration, and has the SFT term."""
    trained_run(tmp_path / "coevolve-s3", (40, 900), (30, 500), method="coevolve")
    trained_run(tmp_path / "eto-s3", (20, 600), (10, 400))
    write_run(tmp_path / "evolve-s3", {f"iter{i}/tasks.jsonl": dict(work="join", D=d, tasks=d)
                                       for i, d in enumerate((7, 31))}, method="evolve")
    for method, expected in {
            "eto": "", "frozen": " --d-fail none", "eto-steps": " --dpo-steps 35",
            "eto-sft": " --lambda-sft 0.1 --pair-weights instruction",
            "positive-steps": " --dpo-steps 35",
            "grpo-tasks": " --start-tasks 31", "evolve-only-rare": " --signals rare"}.items():
        assert " ".join(study_methods.flags(method, tmp_path, 3)) == (
            f"--method {study_methods.method_of(method)}{expected}")
    order = [*study_methods.ALL]  # a run comes after those it takes from, else one job waits
    assert all(order.index(other) < order.index(method)
               for method in order for other in study_methods.equals(method))
    trained_run(tmp_path / "coevolve-s4", method="coevolve")
    with pytest.raises(Refused):
        study_methods.flags("eto-steps", tmp_path, 4)


def test_an_embedding_is_the_mean_state_of_the_action_tokens(small_model):
    """As transformers gives the states of the base model."""
    ids, mask = [5, 9, 11, 7, 30, 8, 6], [0, 0, 0, 1, 1, 0, 1]
    states = AutoModel.from_pretrained(small_model)(torch.tensor([ids])).last_hidden_state[0]
    found = numbers.embedder(small_model)(dict(ids=ids, action_mask=mask))
    assert found == pytest.approx(states[[3, 4, 6]].mean(0).tolist(), abs=1e-5)


METHODS = ["eto-sft-steps", "eto", "frozen"]  # co-evolution joins them


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_model):
    """A study of four methods on two seeds, whose runs are made by hand as they are asked for; and
    its commands. Rewards are drawn, so that any number of a report tells where it comes from."""
    folder, commands, rng = tmp_path_factory.mktemp("study"), [], np.random.default_rng(0)

    def launch(env, command, log):
        commands.append(command)
        flags = dict(zip(command[::2], command[1::2]))
        out, method = Path(flags["--out"]), flags["--method"]
        agents = ("target", "failure") if method == "coevolve" else ("target",)
        phases, files = {}, {}

        def played(output, name, i, n, **more):
            rewards = rng.choice([0.0, 0.5, 0.75, 1.0], n)
            files[output] = [trajectory(
                f"webshop-train-{k % 3}", name, reward, ["x"], i, rollout=k // 3)
                | dict(ids=rng.integers(5, 40, 9).tolist(), action_mask=[0, 0, 0, *[1] * 6])
                for k, reward in enumerate(rewards.tolist())]
            phases[output] = dict(name=name, i=i, episodes=n, seconds=1.0, turns=1.0, budget=0.0,
                                  reward=rewards.mean(), success=(rewards == 1).mean(),
                                  hard=((rewards > 0.6) & (rewards < 1)).mean(), **more)

        for i in range(3):
            for name in agents:
                if i:
                    played(f"iter{i}/{name}.jsonl", name, i, 12, work="explore")
                    phases[f"iter{i}/pairs-{name}.jsonl"] = dict(
                        work="make_pairs", trains=name, pairs={"expert>target": i + 1}, dropped={},
                        seconds=0.0)
                    phases[f"iter{i}/{name}-agent"] = dict(
                        work="train_preferences", name=name, i=i, steps=10 * i + len(agents),
                        tokens=900 * i, seconds=1.0)
            for name in agents:
                played(f"eval-{i}-{name}-test.jsonl", name, i, 6, work="evaluate", split="test")
        write_run(out, phases, seed=int(flags["--seed"]), method=method, hard_threshold=0.7,
                  rollouts=int(flags.get("--rollouts", 2)), out=str(out),
                  dpo_steps=int(flags.get("--dpo-steps", 0)),
                  lambda_sft=float(flags.get("--lambda-sft", 0.1)))
        for output, rows in files.items():
            write_lines(out / output, rows)
        write_lines(out / "experts.jsonl", [])
        (out / "sft-target").symlink_to(small_model)
        (out / "result.json").write_text("{}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "launch", launch)
        study.main(["webshop", "--jobs", "1", "--methods", *METHODS, "--seeds", "0", "1", "--out",
                    str(folder / "runs"), "--lambda-sft", "0.1"])
    return folder / "runs", commands


def test_a_study_runs_methods_by_seed_and_takes_steps_from_co_evolution(finished):
    folder, commands = finished
    assert [c[-1].rpartition("/")[2] for c in commands] == [
        f"{m}-s{seed}" for seed in (0, 1)
        for m in ("coevolve", "eto", "eto-sft-steps", "frozen")]
    for seed in (0, 1):
        equal = " ".join(commands[4 * seed + 2])
        assert f"--reuse {folder} " in equal and f" --seed {seed} " in equal
        # Co-evolution's target took 12 and 22 steps, with an SFT term of 0.1.
        assert ("--method eto --lambda-sft 0.1 --pair-weights instruction --dpo-steps 17 "
                in equal)


def test_the_report_holds_what_the_runs_hold(finished):
    folder, _ = finished
    made = json.loads((folder / "report/report.json").read_text())

    def row(title, **wanted):
        rows = next(rows for name, rows in made.items() if name.startswith(title))
        return next(r for r in rows if wanted.items() <= r.items())

    def lines(method, seed, name):
        return [json.loads(line) for line in
                (folder / f"{method}-s{seed}" / name).read_text().splitlines()]

    def rewards(method, name):
        return [np.mean([r["reward"] for r in lines(method, seed, name)]) for seed in (0, 1)]

    ours, eto = (rewards(m, "eval-2-target-test.jsonl") for m in ("coevolve", "eto"))
    found = row("Greedy", method="co-evolution")["test reward"]
    assert found["mean"] == pytest.approx(np.mean(ours))
    assert row("Over iterations", method="co-evolution", iteration=2)["reward"] == found
    pair = row("Differences", difference="co-evolution - ETO")["reward"]
    assert pair["mean"] == pytest.approx(np.mean(ours) - np.mean(eto))
    hard = {m: np.mean([0.7 <= r["reward"] < 1 for seed in (0, 1) for i in (1, 2)
                        for name in names for r in lines(m, seed, f"iter{i}/{name}.jsonl")])
            for m, names in (("coevolve", ("target", "failure")), ("eto", ("target",)))}
    shares = [row("Table 2", method=method, threshold=0.7)["hard negative"]["mean"]
              for method in ("co-evolution", "co-evolution - ETO")]
    assert shares == pytest.approx([hard["coevolve"], hard["coevolve"] - hard["eto"]])
    took = row("What it took", method="co-evolution")
    assert (took["rollouts"], took["steps of all agents"], took["tokens of the target"]) == (
        48, 68, 2700)
    assert row("Figure 3", agent="ETO")["instructions"] > 0
    for name in ("curves", "figure3"):
        assert (folder / f"report/{name}.svg").read_bytes().startswith(b"<?xml")
    text = (folder / "report/report.txt").read_text()
    for said in ("co-evolution - ETO with SFT term, equal steps", "Table 2",
                 f"{found['mean']:.3f} ± {found['half']:.3f}"):
        assert said in text


@pytest.mark.parametrize("method, changed, says", [
    ("eto", dict(dpo_steps=9), "differ in dpo_steps (0, 9)"),
    ("eto-steps", dict(dpo_steps=9), None),
    ("eto", dict(lambda_sft=0.0), None),  # whose preset it is
    ("eto-steps", dict(rollouts=4, dpo_steps=9), "differ in rollouts (4, 2)"),
    ("frozen", dict(method="coevolve", lambda_sft=0.3), "differ in lambda_sft (0.3, 0.1)"),
    ("sft", dict(method="sft", dpo_steps=9), None),  # which it does not read
    ("positive", dict(method="positive", dpo_steps=9), "differ in dpo_steps (9, 0)")])
def test_a_report_on_runs_of_different_settings_is_refused(tmp_path, method, changed, says):
    same = dict(lambda_sft=0.1, d_fail="all", dpo_steps=0, start_tasks=0)
    for folder, more in ((tmp_path / "positive-s3", dict(method="positive")),
                         (tmp_path / f"{method}-s9", dict(changed, seed=9))):
        (trained_run(folder, **{**same, **more}) / "result.json").write_text("{}")
    if says is None:
        assert {*study_methods.finished(tmp_path)} == {"positive", method}
        return
    with pytest.raises(Refused) as error:
        study.main(["webshop", "--report", "--out", str(tmp_path)])
    assert says in str(error.value)


def made_run(folder, rewards, finished=True, **settings):
    """A run of so many iterations, whose target was evaluated on two tasks after each, with these
    rewards; it explored one task, with the first of them, and took 10 steps."""
    phases, files = {}, {}
    for i, of_tasks in enumerate(rewards):
        phases[f"eval-{i}-target-test.jsonl"] = dict(
            work="evaluate", name="target", i=i, split="test", seconds=0.0, episodes=2,
            reward=sum(of_tasks) / 2, success=sum(r == 1 for r in of_tasks) / 2)
        files[f"eval-{i}-target-test.jsonl"] = of_tasks
        if i:
            phases[f"iter{i}/target.jsonl"] = dict(
                work="explore", name="target", i=i, seconds=0.0, episodes=1)
            files[f"iter{i}/target.jsonl"] = of_tasks[:1]
            phases[f"iter{i}/target-agent"] = dict(work="train_preferences", name="target", i=i,
                                                   steps=10, seconds=0.0)
            (folder / f"iter{i}/target-agent").mkdir(parents=True)
    write_run(folder, phases, **settings)
    for output, of_tasks in files.items():
        write_lines(folder / output, [trajectory(f"webshop-test-{n}", "target", reward, ["x"])
                                      for n, reward in enumerate(of_tasks)])
    if finished:
        (folder / "result.json").write_text("{}")
    return folder


def compared(tmp_path, *words):
    """title -> rows of the report on some runs."""
    compare.main([*map(str, words), "--out", str(tmp_path / "report")])
    return json.loads((tmp_path / "report/report.json").read_text())


def test_variants_of_one_method_and_seed_are_compared_by_hand(tmp_path):
    """base: 0.5 on seed 3, 0.75 on seed 4. ipo: 0.75 and 0.75, and 0 on a seed of its own. So means
    0.625 and 0.5, and ipo - base 0.25 and 0: mean 0.125, half of the interval 12.7062 / 8."""
    for name, seed, last, more in (
            ("base", 3, [1.0, 0.0], {}), ("base", 4, [1.0, 0.5], {}),
            ("ipo", 3, [0.5, 1.0], dict(beta=0.3, gamma=1.0)),
            ("ipo", 4, [1.0, 0.5], dict(beta=0.3, gamma=1.0)),
            ("ipo", 5, [0.0, 0.0], dict(beta=0.3, gamma=1.0))):
        made_run(tmp_path / f"{name}{seed}", [[0.0, 0.0], last], method="eto", seed=seed,
                 **{"beta": 0.1, **more})
    made = compared(tmp_path, *(f"{name[:-1]}={tmp_path / name}" for name in
                                ("base3", "base4", "ipo3", "ipo4", "ipo5")))
    assert made["Settings in which they differ"] == [
        dict(setting=setting, name=name, value=value) for setting, name, value in (
            ("beta", "base", "0.1"), ("beta", "ipo", "0.3"),
            ("gamma", "base", "-"), ("gamma", "ipo", "1.0"))]
    first, second = made["Greedy evaluation of the target after its last iteration"]
    assert (first["method"], first["seeds"], second["seeds"]) == ("base", "3 4", "3 4 5")
    assert first["test reward"]["mean"] == pytest.approx(0.625)
    assert second["test reward"]["mean"] == pytest.approx(0.5)
    difference, = made["Differences on the same seeds"]
    assert difference["difference"] == "ipo - base"
    assert difference["reward"] == pytest.approx(
        dict(n=2, mean=0.125, half=12.7062 / 8, ahead=1, sure=False))
    assert (tmp_path / "report/curves.svg").exists()
    with pytest.raises(Refused, match="base.* has that name and seed 3 too"):
        compared(tmp_path, f"a={tmp_path / 'base3'}", f"a={tmp_path / 'ipo3'}")


def test_a_run_of_the_core_and_one_of_a_method_that_a_fork_has_are_compared(tmp_path):
    """The core's has no result.json and none of lab's settings; a setting at its default is none
    in which they differ. A name that is a method's is shown as it was given."""
    core = made_run(tmp_path / "core", [[0.5, 0.0], [1.0, 0.5]], False, method="eto", seed=3)
    fork = made_run(tmp_path / "fork", [[0.5, 0.0], [0.5, 0.5]], method="votes", seed=3,
                    margins=10_000)
    made = compared(tmp_path, f"frozen={core}", f"votes={fork}")
    assert [row["setting"] for row in made["Settings in which they differ"]] == ["method"] * 2
    difference, = made["Differences on the same seeds"]
    assert difference["difference"] == "votes - frozen"
    assert difference["reward"]["mean"] == pytest.approx(0.5 - 0.75)
    table = {row["method"]: row for name, rows in made.items() if name.startswith("Table 2")
             for row in rows if row["threshold"] == 0.6}
    assert table["frozen"]["success"]["mean"] == 1.0 and table["votes"]["negative"]["mean"] == 1.0
    # Without names, a method that lab does not know is a method too.
    assert compared(tmp_path, fork)["Over iterations"][-1]["method"] == "votes"


def with_code(run, **codes):
    """The run, whose phases of these kinds have such code; of None as the plain core records it."""
    phases = json.loads((run / "phases.json").read_text())
    for row in phases.values():
        code, exact = codes.get(row["work"], ("same", "same"))
        row["code"] = code
        if exact:
            row["made"] = dict(code=exact)
    (run / "phases.json").write_text(json.dumps(phases))
    return run


def test_runs_that_differ_in_code_alone_are_said_to(tmp_path):
    """The program of a fork is another in all phases, what a phase runs in one kind of them. Of the
    plain core the program is all that is known."""
    for name, exact in (("base", ("old", "a")), ("copy", ("new", "a")), ("fork", ("new", "b"))):
        with_code(made_run(tmp_path / name, [[0.5], [1.0]], method="eto", seed=3),
                  train_preferences=exact)
    with_code(made_run(tmp_path / "core", [[0.5], [1.0]], method="eto", seed=3),
              train_preferences=("new", None), explore=("same", None), evaluate=("same", None))
    title = "Phases that different code made"

    def table(*names):
        made = compared(tmp_path, *(f"{name}={tmp_path / name}" for name in names))
        return [(row["phase"], row["name"], row["code"]) for row in made.get(title, [])]

    assert table("base", "copy") == []
    assert table("base", "fork") == [("train_preferences", "base", "a"),
                                     ("train_preferences", "fork", "b")]
    assert table("base", "core") == [("train_preferences", "base", "old"),
                                     ("train_preferences", "core", "new")]
    assert table("copy", "core") == []


def test_what_is_no_run_is_refused_and_what_is_empty_is_no_number(tmp_path):
    agent = tmp_path / "agent"
    agent.mkdir()
    (agent / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(Refused, match="agent: not a run, it has no config.json with settings"):
        compared(tmp_path, f"mine={agent}")
    run = made_run(tmp_path / "run", [[0.5, 0.0], [1.0, 0.5]], method="eto", seed=3)
    (run / "eval-1-target-test.jsonl").write_text("")
    made = compared(tmp_path, f"run={run}")
    assert [row["iteration"] for row in made["Over iterations"]] == [0]


def test_a_copied_folder_has_none_of_its_bases_numbers(tmp_path):
    """Its phases.json still tells of two iterations; of the second, and of the agents, nothing is
    there. What a file says counts, not what was recorded of it."""
    base = made_run(tmp_path / "base", [[0.5, 0.0], [1.0, 0.5], [1.0, 1.0]], method="eto", seed=3)
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    for name in "iter2", "iter1/target-agent":
        shutil.rmtree(copy / name)
    for name in "eval-1-target-test.jsonl", "eval-2-target-test.jsonl", "result.json":
        (copy / name).unlink()
    write_lines(copy / "eval-0-target-test.jsonl", [trajectory("a", "target", 0.125, ["x"])])
    made = compared(tmp_path, f"base={base}", f"copy={copy}")
    of_copy = [row for row in made["Over iterations"] if row["method"] == "copy"]
    assert [(row["iteration"], row["reward"]["mean"]) for row in of_copy] == [(0, 0.125)]
    took = {row["method"]: row for row in made["What it took after the first SFT, means over seeds"]}
    assert (took["copy"]["steps of the target"], took["copy"]["rollouts"]) == (0, 1)
    assert (took["base"]["steps of the target"], took["base"]["rollouts"]) == (20, 2)
    # An agent of a finished run may have been deleted; a run that has just begun has no number.
    shutil.rmtree(base / "iter2/target-agent")
    begun = write_run(tmp_path / "begun", {}, method="eto", seed=3)
    (begun / "phases.json").unlink()
    took, = (row for row in compared(tmp_path, f"base={base}", f"begun={begun}")[
        "What it took after the first SFT, means over seeds"] if row["method"] == "base")
    assert took["steps of the target"] == 20
    assert "Over iterations" not in compared(tmp_path, f"begun={begun}")


def test_a_run_that_fails_is_named_and_its_log_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "ROOT", tmp_path)
    (tmp_path / "run.sh").write_text("echo $*; exit 2")
    log = tmp_path / "eto-s0.log"
    with pytest.raises(Refused, match=f"eto-s0 ended with status 2 .{log}"):
        study.launch("webshop", ["--beta", "-1", "--out", str(tmp_path / "eto-s0")], log)
    assert log.read_text().startswith("webshop --beta -1 --out")


@pytest.fixture
def begun(monkeypatch):
    """Names of the runs that a study began, none of which is made."""
    found = []
    monkeypatch.setattr(study, "launch",
                        lambda env, command, log: found.append(Path(command[-1]).name))
    return found


@pytest.mark.parametrize("line, said", [
    ("--methods sft eto --d-fail cross", "--d-fail is not read by --method"),
    ("--methods sft eto --temperature 0 --rollouts 2", "--temperature 0"),
    ("--seed 3", "--methods and --seeds"), ("--betta 1", "--betta 1"),
    ("--report", "no finished run")])
def test_what_a_study_cannot_do_is_said_before_any_run(begun, tmp_path, line, said):
    with pytest.raises(Refused, match=said):
        study.main(["webshop", *line.split(), "--out", str(tmp_path / "none")])
    assert not begun and not (tmp_path / "none").exists()


def test_a_method_is_given_the_settings_that_it_reads():
    more = "--iterations 2 --quick --beta=0.2 --train-tasks 6 --d-fail none --threads 1".split()
    methods = ["sft", "eto", "frozen"]
    assert study.read_by("sft", methods, more) == "--quick --train-tasks 6 --threads 1".split()
    assert study.read_by("eto", methods, more) == (
        "--iterations 2 --quick --beta=0.2 --train-tasks 6 --threads 1".split())
    assert study.read_by("frozen", methods, more) == more
    assert study.read_by("eto", methods[:2], more) == more  # nobody reads --d-fail: it is refused


def test_a_study_shows_no_password(begun, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ})
    study.make_runs("intercodesql", ["sft"], [3], tmp_path, [
        "--mysql-url", "mysql://agent:canary@h:1", "--intercode-data", str(tmp_path),
        "--model", "m"], 1)
    said = capsys.readouterr().out
    assert "--mysql-url" in said and "canary" not in said


def test_a_study_that_is_stopped_ends_its_runs(tmp_path, monkeypatch):
    """SIGTERM, to the study alone, while two runs work, which only wait here."""
    monkeypatch.setattr(study, "ROOT", tmp_path)
    (tmp_path / "run.sh").write_text("echo works; exec sleep 600")
    said, logs = tmp_path / "said", [tmp_path / f"out/sft-s{seed}.log" for seed in (3, 4)]

    def work():
        signal.signal(signal.SIGTERM, study.stop)
        study.main(["webshop", "--methods", "sft", "--seeds", "3", "4", "--jobs", "2", "--out",
                    str(tmp_path / "out")])

    process = fork(work, said)
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
            raise Refused("eto-s3 ended with status 2")
        time.sleep(0.1)
        events.append(f"{name} ends")

    monkeypatch.setattr(study, "launch", launch)
    monkeypatch.setattr(study_methods, "costs",
                        lambda run: events.append(f"{run.name} is read") or dict(steps=7))
    with pytest.raises(Refused, match="eto-s3 ended with status 2"):
        study.make_runs("webshop", ["coevolve", "eto", "eto-steps", "ppo"], [3, 4], tmp_path, [], 2)
    # The run that had begun came to its end, and nothing was begun any more.
    assert sorted(events) == ["coevolve-s3 begins", "coevolve-s3 ends", "eto-s3 begins"]
    events, fails = [], False
    study.make_runs("webshop", ["coevolve", "eto-steps", "ppo"], [3, 4], tmp_path, [], 3)
    for seed in (3, 4):
        order = [events.index(e) for e in (f"coevolve-s{seed} ends", f"coevolve-s{seed} is read",
                                           f"eto-steps-s{seed} begins")]
        assert order == sorted(order)
    assert len(events) == 2 * 6 + 2
