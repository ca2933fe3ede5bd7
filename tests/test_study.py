"""The study: statistics by hand, the order of its runs, and reports on handmade runs."""

import json
import math
import os
import signal
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from conftest import LIMIT, ended, fork, wait_until
from safetensors.torch import save_file
from test_report import trajectory, write_lines, write_run
from transformers import AutoModel

from common.settings import UsageError
from lab.page import figures
from lab.study import changes, compare, methods, numbers, study

# ------------------------------------------------------------------------------ statistics


def group(a, b):
    return [(dict(x=[x]), dict(x=[y])) for x, y in zip(a, b)]


@pytest.mark.parametrize("a, b, mean, half, ahead, p", [
    # Differences 0.1, 0.2, 0.3: variance 0.01, half width 4.303 x 0.1 / sqrt(3) = 0.2484. With two
    # degrees of freedom p = 1 - t / sqrt(2 + t^2), and t = 0.2 sqrt(3) / 0.1 = 3.464.
    ((.6, .8, 1.), (.5, .6, .7), 0.2, 0.2484, 3, 0.0742),
    # 0.0 and -0.2: half width 12.706 x 0.1; t = 1, and with one degree of freedom p = 1/2.
    ((.5, .6), (.5, .8), -0.1, 1.2706, 0, 0.5),
    # 1, 2, 3, 4, 5: variance 2.5, half width 2.776 sqrt(2.5 / 5), t = 4.243.
    (range(1, 6), [0] * 5, 3, 1.9632, 5, 0.0132),
    ((.5, .5), (.5, .5), 0, 0, 0, 1)])
def test_differences_by_hand(a, b, mean, half, ahead, p):
    found = numbers.interval(group(a, b), "x")
    found = found["mean"], found["half"], found["ahead"], numbers.p_value(found)
    assert found == pytest.approx((mean, half, ahead, p), abs=1e-4)
    assert compare.cell(numbers.interval(group([1.0], [0.25]), "x")) == "+0.750"  # of one seed


def test_quantiles_are_those_of_published_tables():
    for df, quantile in (1, 12.7062), (2, 4.3027), (4, 2.7764), (19, 2.0930), (120, 1.9799):
        assert numbers.t_quantile(df) == pytest.approx(quantile, abs=1e-4)


def test_holm_by_hand():
    """In ascending order 0.005 x 4, 0.01 x 3, 0.03 x 2 and 0.04 x 1, which must not be below 0.06."""
    assert numbers.holm([.01, .04, .03, .005]) == pytest.approx([.03, .06, .06, .02])
    assert numbers.holm([.9, .8]) == [1, 1] and numbers.holm([]) == []


@pytest.mark.parametrize("sizes", [(9,), (5, 12)])
def test_bootstrap_draws_seeds_and_the_same_tasks_for_all_seeds(sizes):
    """The oracle draws seeds and tasks literally, and averages the environments."""
    rng = np.random.default_rng(5)
    values = [[rng.normal(size=n) + rng.normal() for n in sizes] for _ in range(3)]
    samples = []
    for _ in range(6000):
        seeds = rng.integers(3, size=3)
        tasks = [rng.integers(n, size=n) for n in sizes]
        samples.append(np.mean([values[s][k][drawn].mean() for s in seeds for k, drawn in enumerate(tasks)]))
    assert [*numbers.bootstrap(values).values()] == pytest.approx(np.percentile(samples, [2.5, 97.5]), abs=0.09)


def test_mean_distance_by_hand():
    """Unit vectors at 0, 60 and 90 degrees: cosines 1/2, 0 and cos 30; lengths do not matter."""
    vectors = np.array([[2.0, 0.0], [0.5, math.sqrt(0.75)], [0.0, 3.0]])
    assert numbers.mean_distance(vectors) == pytest.approx(1 - (0.5 + 0 + math.sqrt(0.75)) / 3)
    rows = [dict(task=t, reward=r, at=k, action_mask=[k < 9]) for t, r, k in (
        ("a", .5, 9), ("a", .5, 0), ("a", .5, 2), ("a", 1., 1), ("b", .5, 0), ("c", 1., 0), ("c", 1., 1))]
    assert numbers.distances(rows, lambda row: vectors[row["at"]]) == pytest.approx({"a": 1.0})


def test_an_embedding_is_the_mean_state_of_the_action_tokens(small_model):
    """The states are those of the base model in transformers."""
    ids, mask = [5, 9, 11, 7, 30, 8, 6], [0, 0, 0, 1, 1, 0, 1]
    states = AutoModel.from_pretrained(small_model)(torch.tensor([ids])).last_hidden_state[0]
    found = numbers.embedder(small_model)(dict(ids=ids, action_mask=mask))
    assert found == pytest.approx(states[[3, 4, 6]].mean(0).tolist(), abs=1e-5)


# ------------------------------------------------------------------------------ runs by hand


def made_run(folder, rewards, finished=True, target="target", failure=(), per_task=1, **settings):
    """Writes a run whose target has these rewards after each iteration. `failure` are the rewards of
    a second agent. In iteration i the target explored one task, with the first of the rewards, and took
    10 i steps. The agent failure-target took 3 steps."""
    phases, files = {}, {}

    def phase(output, rewards=(), **numbers):
        phases[output] = dict(seconds=0.0, reward=0.0, success=0.0, hard_negative=0.0) | numbers
        files[output] = rewards

    for name, of_agent in (target, rewards), ("failure", failure):
        for i, of_tasks in enumerate(of_agent):
            phase(f"eval-{i}-{name}-test.jsonl", of_tasks, name=name, i=i, split="test", episodes=2)
            if i and name == target:
                phase(f"iter{i}/{name}.jsonl", of_tasks[:1], name=name, i=i, episodes=1)
                phase(f"iter{i}/{name}-agent", name=name, i=i, steps=10 * i, tokens=900)
                phase(f"iter{i}/second-agent", name="failure-target", i=i, steps=3)
    write_run(folder, phases, **dict(method="eto", seed=3) | settings)
    for output, of_tasks in files.items():
        if of_tasks:
            write_lines(folder / output, [
                trajectory(f"webshop-train-{n // per_task}", phases[output]["name"], reward, ["x"],
                           rollout=n % per_task) | dict(ids=[5, 9, 11, 7 + n], action_mask=[0, 0, 1, 1])
                for n, reward in enumerate(of_tasks)])
    if finished:
        (folder / "result.json").write_text("{}")
    return folder


def rows_of(folder, title, **wanted):
    """Returns the rows of the report's table whose title contains `title`."""
    made = json.loads((folder / "report.json").read_text())
    rows = next((rows for name, rows in made.items() if title in name), [])
    return [row for row in rows if wanted.items() <= row.items()]


def compared(tmp_path, *words):
    compare.main([*map(str, words), "--out", str(tmp_path / "report")])
    return tmp_path / "report"


def changed(folder, **config):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


def test_the_last_iteration_and_all_iterations(tmp_path, capsys):
    """After the last iteration co-evolution has 1 and 0, and ETO 0 and 0.25. The differences 1 and
    -0.25 have the mean 0.375 and the half width 12.7062 x 0.625. With a single task, one of 2,000
    samples in four draws the first seed twice."""
    curves = {"coevolve": [[0, 0, .5, 1], [0, .75, 0, 0]], "eto": [[0, .25, 0], [0, 0, .25]]}
    for arm, seeds in curves.items():
        for seed, rewards in enumerate(seeds):
            made_run(tmp_path / f"{arm}-s{seed}", [[reward] for reward in rewards], method=arm, seed=seed)
    study.main(["webshop", "--report", "--out", str(tmp_path)])
    folder = tmp_path / "report"
    assert [(row["seed"], row["iteration"], row["reward"]["mean"]) for row in rows_of(folder, "Evaluation")] == [
        ("0, 1", "3", 0.5), ("0, 1", "2", 0.125), ("0, 1", "3 - 2", 0.375)]
    assert rows_of(folder, "Over iterations", method="eto", iteration=1)[0]["reward"]["mean"] == 0.125
    assert "+0.375 ± 7.941 [-0.250, +1.000] (1 of 2)" in capsys.readouterr().out
    picture = (folder / "curves-webshop.svg").read_text()
    assert "95% t interval over seeds" in picture and "coevolve, seed 0 1" in picture


def test_the_tables_of_exploration_and_cost(tmp_path, small_model):
    """The explored rewards are 1, 0.65 and 0.25. Distances are between failures of one task. One seed has
    no interval over seeds, also in the picture."""
    for arm in "coevolve", "eto":
        run = made_run(tmp_path / f"{arm}-s3", [[0, 0], [1.0, 0], [0.65, 0], [0.25, 0]], method=arm)
        (run / "sft-target").symlink_to(small_model)
    study.main(["webshop", "--report", "--out", str(tmp_path)])
    folder = tmp_path / "report"
    shares = [[round(row[name]["mean"], 3) for name in numbers.SHARES]
              for row in rows_of(folder, "Table 2", method="eto")]
    assert shares == [[0.333, 0.333, 0.333], [0.333, 0.667, 0.0], [0.333, 0.667, 0.0]]
    assert rows_of(folder, "Table 2", method="coevolve - eto")[0]["success"]["mean"] == 0
    [row] = rows_of(folder, "What it took", method="eto")
    assert [row[name]["mean"] for name in numbers.COSTS] == [60, 69, 2700, 3]
    assert "±" not in (folder / "report.txt").read_text().split("Each number")[0]
    assert "interval" not in (folder / "curves-webshop.svg").read_text()


@pytest.mark.parametrize("arm, changed, says", [
    ("eto", dict(dpo_steps=9), "differ in dpo_steps (0, 9)"),
    ("eto", dict(lambda_sft=0.0), None),  # its preset
    ("eto-steps", dict(rollouts=4, dpo_steps=9), "differ in rollouts (4, 2)"),
    ("eto-steps", dict(dpo_steps=9), None),  # a number for each seed
    ("eto-sft", dict(lambda_sft=0.5), "differ in lambda_sft (0.5, 0.1)"),  # its own, but one for all seeds
    ("sft", dict(method="sft", dpo_steps=9), None),  # SFT does not read it
    ("positive", dict(method="positive", dpo_steps=9), "differ in dpo_steps (9, 0)")])
def test_a_report_on_runs_of_different_settings_is_refused(tmp_path, arm, changed, says):
    same = dict(lambda_sft=0.1, d_fail="all", dpo_steps=0, start_tasks=0)
    made_run(tmp_path / "positive-s3", [], **same, method="positive")
    if arm.startswith("eto-"):
        made_run(tmp_path / f"{arm}-s4", [], **same, seed=4)
    made_run(tmp_path / f"{arm}-s9", [], **same | changed, seed=9)
    if says is None:
        assert {*methods.finished(tmp_path)["webshop"]} == {"positive", arm}
        return
    with pytest.raises(UsageError) as error:
        study.main(["webshop", "--report", "--out", str(tmp_path)])
    assert says in str(error.value)


def test_runs_of_one_name_are_seeds_and_only_settings_that_are_read_differ(tmp_path):
    """`slots` changes nothing but rounding, ETO does not read `d_fail`, and a copy of the program has a
    setting of its own, gamma."""
    fork = dict(beta=0.3, gamma=1.0)
    for name, seed, more in (("base", 3, dict(d_fail="all")), ("base", 4, dict(slots=7)), ("ipo", 3, fork),
                             ("ipo", 4, fork), ("ipo", 5, fork)):
        made_run(tmp_path / f"{name}{seed}", [[seed / 10]], seed=seed, **{"beta": 0.1, "slots": 1, **more})
    folder = compared(tmp_path, *(f"{name[:-1]}={tmp_path / name}" for name in
                                  ("base3", "base4", "ipo3", "ipo4", "ipo5")))
    assert [tuple(row.values()) for row in rows_of(folder, "Settings in which they differ")] == [
        ("beta", "base", "0.1"), ("beta", "ipo", "0.3"), ("gamma", "base", "-"), ("gamma", "ipo", "1.0")]
    assert [(row["method"], row["seed"], round(row["reward"]["mean"], 3)) for row in rows_of(folder, "Evaluation")] == [
        ("base", "3, 4", 0.35), ("ipo", "3, 4, 5", 0.4), ("ipo - base", "3, 4", 0)]


def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path):
    base = made_run(tmp_path / "base", [[0, 0], [1.0, 0.5]], eval_splits="test")
    more = made_run(tmp_path / "more", [[0, 0, 0]], eval_splits="test")
    made_run(tmp_path / "dev", [[0, 0]], eval_splits="validation")
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/config.json").write_text('{"model_type": "llama"}')
    for other, says in (
            (f"eto={more}", "both eto with seed 3; leave one out"), (f"x={tmp_path / 'agent'}", "agent: not a run"),
            (f"x={more}", "more/eval-0-.* has 3 tasks, which are not the 2 of .*base/.*--eval-tasks"),
            (f"x={tmp_path / 'dev'}", "--eval-splits validation, and .*base test")):
        with pytest.raises(UsageError, match=says) as error:
            compared(tmp_path, base, other)
        assert "\n" not in str(error.value)


def test_notes_unfinished_runs_branches_of_other_seeds_and_emptied_files(tmp_path):
    base = made_run(tmp_path / "base", [[0, 0], [1.0, 0], [1.0, 0.5]])
    fork = made_run(tmp_path / "fork", [[0, 0], [0.5, 0]], False)
    folder = compared(tmp_path, f"base={base}", f"fork={fork}")
    [row] = rows_of(folder, "Evaluation", method="fork - base")
    assert (row["iteration"], row["reward"]["mean"]) == ("1 - 2", pytest.approx(0.25 - 0.75))
    assert {row["method"]: row["note"] for row in rows_of(folder, "Runs to note")} == {
        "fork": "unfinished, iteration 1"}
    changed(fork, finished=True, branch=dict(seed=2))
    (fork / "eval-1-target-test.jsonl").write_text("")
    folder = compared(tmp_path, f"base={base}", f"fork={fork}")
    assert not rows_of(folder, "Runs to note")
    assert [(row["seed"], row["iteration"]) for row in rows_of(folder, "Evaluation")] == [("3", "2"), ("2>3", "0")]


def test_several_environments_have_their_own_tables_and_an_average(tmp_path):
    """On WebShop's two tasks the difference is 1/2 with each of three seeds. On three tasks of
    InterCodeSQL it is 1/2, 1/4 and 1/2, so t = (5/12) / (1/12) = 5, and p = 1 - 5 / sqrt(27)."""
    for env, tasks, coevolve, frozen in (("webshop", 2, .5, (0, 0, 0)), ("intercodesql", 3, 1, (.5, .75, .5))):
        for seed, reward in enumerate(frozen):
            for arm, last in ("coevolve", coevolve), ("frozen", reward):
                made_run(tmp_path / env / f"{arm}-s{seed}", [[0] * tasks, [last] * tasks], method="coevolve",
                         seed=seed, env=env)
    folder = compared(tmp_path, tmp_path / "webshop", tmp_path / "intercodesql")
    for title, frozen, lead in (("webshop: Eval", 0, 1 / 2), ("intercodesql: Eval", 7 / 12, 5 / 12),
                                ("average of webshop, intercodesql: Eval", 7 / 24, 11 / 24)):
        found = {row["method"]: row["reward"]["mean"] for row in rows_of(folder, title)}
        assert (found["frozen"], found["coevolve - frozen"]) == pytest.approx((frozen, lead))
    rows = rows_of(folder, "corrected for 2 tests")
    assert [(row["environment"], row["difference"]) for row in rows] == [
        (env, "coevolve - frozen") for env in ("webshop", "intercodesql")]
    assert [rows[1]["p"], rows[1]["corrected p"]] == pytest.approx([1 - 5 / math.sqrt(27)] * 2, abs=1e-4)
    with pytest.raises(UsageError, match="in the same environment"):
        compared(tmp_path, tmp_path / "webshop", tmp_path / "webshop")


def differences(folder, **wanted):
    return {row["what"]: row["difference"] for row in rows_of(folder, "What differs", **wanted)}


def test_agents_are_compared_by_role(tmp_path):
    """The target is called student in one run, which is evaluated first. In the other run the failure
    agent alone is another one."""
    base = made_run(tmp_path / "base", [[0, 0], [1.0, 0.5]], failure=[[0, 0], [0.5, 0]], method="coevolve")
    own = made_run(tmp_path / "own", [[0, 0], [1.0, 0.5]], failure=[[0, 0], [0.5, 0.5]], method="coevolve",
                   target="student\x1b[2J")
    folder = compared(tmp_path, f"base={base}", f"own\x1b[2J={own}")
    leads = {row["agent"]: row["reward"]["mean"] for row in rows_of(folder, "Evaluation", method="own\x1b[2J - base")}
    assert leads == {"target": 0, "failure": 0.25}
    assert [row["steps of the target"]["mean"] for row in rows_of(folder, "What it took")] == [10, 10]
    found = differences(folder)
    assert found["episodes of target, test"] == "all 2 are identical, iteration 1"
    assert found["episodes of failure, test"] == "1 of 2 have other text, iteration 1"
    assert found["first output, seed 3"] == "no output of both differs"  # but evaluations
    assert found["only in base, seed 3"].startswith("eval-0-target-test.jsonl, eval-1-target-test.jsonl, iter1/")
    text = (folder / "report.txt").read_text()
    assert "own<1B>[2J" in text and "\x1b" not in text


def test_a_sampled_evaluation_is_named_and_not_compared_with_greedy_episodes(tmp_path):
    """Two rollouts of the tasks earn 1 and 0, and 1 and 1: 0.75, where the run ended with 0.5. Evaluation
    does not read beta."""
    base = made_run(tmp_path / "base", [[0, 0], [0.5, 0.5]], beta=0.1, temperature=0.7)
    sampled = made_run(tmp_path / "sampled", [[1, 0, 1, 1]], method="evaluate", per_task=2, beta=9, temperature=0.7)
    folder = compared(tmp_path, base, sampled)
    how = "temperature 0.7, 2 rollouts"
    assert [(row["sampling"], row["iteration"], row["reward"]["mean"]) for row in rows_of(folder, "Evaluation")] == [
        ("greedy", "1", 0.5), (how, "0", 0.75), (f"{how} - greedy", "0 - 1", 0.25)]
    assert {row["setting"] for row in rows_of(folder, "Settings")} == {"method"}
    assert differences(folder)["episodes of target, test"] == f"not compared: {how} - greedy"


def test_the_report_starts_with_the_differences(tmp_path, capsys):
    """For identical runs it prints that nothing differs. `same` has other log-probabilities, by rounding."""
    runs = {name: made_run(tmp_path / name, [[0, 0], [1.0, 0.5]]) for name in ("base", "same", "loss", "pairs")}
    for name, run in runs.items():
        agent = run / "iter1/target-agent"
        agent.mkdir(parents=True)
        save_file({"w": torch.tensor([1.0, 1.25 if name == "loss" else 1.0])}, agent / "model.safetensors")
        phases = json.loads((run / "phases.json").read_text())
        trained = phases.pop("iter1/target-agent") | dict(first_loss=0.5 if name == "loss" else 0.9)
        count = 1 if name == "pairs" else 2
        pairs = dict(seconds=float(count), pairs={"expert>target": count})
        (run / "phases.json").write_text(json.dumps(
            {"iter1/pairs-target.jsonl": pairs, "iter1/target-agent": trained} | phases))
        write_lines(run / "iter1/pairs-target.jsonl", [dict(kind="expert>target")] * count)
        changed(run, code=dict(commit="a" * 40, files={"dpo.py": name} if name == "loss" else {}))
    for name, old, new in ("loss", '"reward": 0.5', '"reward": 0.0'), ("same", '"turns"', '"log_probs": [1], "turns"'):
        played = runs[name] / "eval-1-target-test.jsonl"
        played.write_text(played.read_text().replace(old, new))
    folder = compared(tmp_path, *(f"{name}={run}" for name, run in runs.items()))
    identical = "all 2 are identical, iteration 1"
    for name, code, first, episodes in (
            ("same", "none differs", "no output of both differs", identical),
            ("loss", "dpo.py", "iter1/target-agent: weights differ by at most 0.25, first_loss 0.9 -> 0.5",
             "1 of 2 have other text, iteration 1"),
            ("pairs", "none differs", "iter1/pairs-target.jsonl: 1 of 2 lines differ, 2 pairs (2 expert>target) "
             "-> 1 pair (1 expert>target)", identical)):
        assert differences(folder, method=name) == {"settings": "none differ", "code": code, "first output, seed 3":
                                                    first, "episodes of target, test": episodes}
    said = capsys.readouterr().out
    assert said.index("What differs from base") < said.index("Evaluation after")
    save_file({"w": torch.ones(3)}, agent / "model.safetensors")
    assert changes.weight_change(runs["base"] / "iter1/target-agent", agent) == ["other sizes of weight files"]


def test_equal_curves_are_side_by_side_and_no_rate_axis_goes_below_0():
    assert figures.shifted([(0, .5), (1, .6)], 2, 3) == [(.2, .5), (1.2, .6)]
    assert figures.shifted([(0, .5)], 11, 12) == [(pytest.approx(.55), .5)]
    for lowest in 0, -0.5:
        _, (ax,) = figures.figure(1)
        ax.errorbar((0, 1), (lowest, 0.1), 0.5, capsize=3)
        figures.label(ax, "reward")
        assert (ax.get_ylim()[0] < 0) == (lowest < 0)


# ------------------------------------------------------------------------------ making runs


@pytest.fixture(autouse=True)
def own_environment_variables(monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ})


@pytest.fixture
def begun(monkeypatch):
    """The commands of the runs that a study started. They are not executed."""
    found = []
    monkeypatch.setattr(study, "launch", lambda env, words, log: found.append(" ".join(words)))
    return found


@pytest.mark.parametrize("line, said", [
    ("--methods sft eto --d-fail cross", "--d-fail is not read by --method"),
    ("--methods sft eto --temperature 0 --rollouts 2", "--temperature 0"),
    ("--seed 3", "--methods and --seeds"), ("--betta 1", "--betta 1"),
    ("--methods eto-sft --eto-lambda-sft -1", "--lambda-sft -1.0"),
    ("--report", "no finished run")])
def test_errors_of_a_study_are_found_before_any_run(begun, tmp_path, line, said):
    with pytest.raises(UsageError, match=said):
        study.main(["webshop", *line.split(), "--out", str(tmp_path / "none")])
    assert not begun and not (tmp_path / "none").exists()


def test_a_method_is_given_the_settings_that_it_reads():
    more = "--iterations 2 --quick --beta=0.2 --train-tasks 6 --d-fail none --webshop-url u".split()
    arms = ["sft", "eto", "frozen"]
    assert study.read_by("sft", arms, more) == "--quick --train-tasks 6 --webshop-url u".split()
    assert study.read_by("eto", arms, more) == (
        "--iterations 2 --quick --beta=0.2 --train-tasks 6 --webshop-url u".split())
    assert study.read_by("frozen", arms, more) == more
    assert study.read_by("eto", ["sft", "eto"], more) == more  # nobody reads --d-fail: it is refused


def test_a_study_that_is_stopped_ends_its_runs(tmp_path, monkeypatch):
    """SIGTERM is sent to the study alone, while two runs sleep."""
    monkeypatch.setattr(study, "ROOT", tmp_path)
    (tmp_path / "run.sh").write_text("echo works $OMP_NUM_THREADS; exec sleep 600")
    said, logs = tmp_path / "said", [tmp_path / f"out/sft-s{seed}.log" for seed in (3, 4)]

    def work():
        os.environ.pop("OMP_NUM_THREADS", None)
        signal.signal(signal.SIGTERM, study.stop)
        study.main(["webshop", "--methods", "sft", "--seeds", "3", "4", "--jobs", "2", "--out",
                    str(tmp_path / "out")])

    process = fork(work, said)
    # The cores of a machine do not change what a study of the tiny model finds.
    wait_until(lambda: all(log.exists() and log.read_text() == "works 1\n" for log in logs),
               "both runs to write to their logs")
    family = psutil.Process(process).children(recursive=True)
    os.kill(process, signal.SIGTERM)
    assert ended(process) == 143 and len(family) == 2
    assert said.read_text().endswith("rerun the same command to resume\n")
    assert not psutil.wait_procs(family, timeout=300)[1]


def test_runs_are_concurrent_but_start_after_those_whose_steps_they_take(tmp_path, monkeypatch):
    two, events = threading.Barrier(2), []

    def launch(env, words, log):
        name = Path(words[-1]).name
        events.append(f"{name} begins")
        if name in ("coevolve-s3", "ppo-s3"):
            two.wait(LIMIT)  # neither run can end alone
        events.append(f"{name} ends")

    monkeypatch.setattr(study, "launch", launch)
    monkeypatch.setattr(methods, "taken_from", lambda run: events.append(f"{run.name} is read") or dict(steps=7))
    arms = {arm: methods.ARMS[arm] for arm in ("coevolve", "eto-steps", "ppo")}
    study.make_runs("webshop", arms, [3, 4], tmp_path, [], 3)
    for seed in (3, 4):
        order = [events.index(e) for e in (f"coevolve-s{seed} ends", f"coevolve-s{seed} is read",
                                           f"eto-steps-s{seed} begins")]
        assert order == sorted(order)
    assert len(events) == 2 * 6 + 2


def test_no_run_starts_after_one_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "ROOT", tmp_path)
    (tmp_path / "run.sh").write_text("echo $*; exit 2")
    with pytest.raises(UsageError, match=f"sft-s3 ended with status 2; {tmp_path}/sft-s3.log has"):
        study.make_runs("webshop", {arm: methods.ARMS[arm] for arm in ("sft", "eto")}, [3, 4], tmp_path,
                        ["--rollouts", "2"], 1)
    assert [file.name for file in tmp_path.glob("*.log")] == ["sft-s3.log"]
    assert (tmp_path / "sft-s3.log").read_text().startswith("webshop --")


def test_a_study_runs_each_arm_on_each_seed_with_its_flags(begun, tmp_path):
    """The target of coevolve takes 10 and 20 steps on seed 0, 15 on average, and 10 on seed 1. ETO + SFT
    takes lambda_SFT of coevolve, unless it has its own, for which it needs no other run."""
    for seed, count in (0, 3), (1, 2):
        made_run(tmp_path / f"coevolve-s{seed}", [[0]] * count, seed=seed, method="coevolve", lambda_sft=0.2)

    def commands(line):
        begun.clear()
        study.main(["webshop", "--jobs", "1", *line.split(), "--out", str(tmp_path), "--rollouts", "2"])
        return begun

    eto = "--method eto --lambda-sft {} --pair-weights instruction"
    for more, x in ("", "0.2"), ("--eto-lambda-sft 0.5", "0.5"):
        assert commands(f"--methods eto-sft-steps frozen --seeds 0 1 {more}") == [
            f"--rollouts 2 {flags} --seed {seed} --out {tmp_path}/{arm}-s{seed}"
            for seed, steps in ((0, 15), (1, 10)) for arm, flags in (
                ("coevolve", "--method coevolve"), ("eto-sft-steps", f"{eto.format(x)} --dpo-steps {steps}"),
                ("frozen", "--method coevolve --d-fail none"))]
    assert commands("--methods eto-sft-one --seeds 8 --eto-lambda-sft 0.5") == [
        f"--rollouts 2 {eto.format(0.5)} --rollouts 1 --seed 8 --out {tmp_path}/eto-sft-one-s8"]
    write_run(tmp_path / "evolve-s3", {f"iter{i}/tasks.jsonl": dict(tasks=d)
                                       for i, d in enumerate((7, 31))}, method="evolve")
    assert methods.filled(methods.ARMS["grpo-tasks"], tmp_path, 3) == "--method grpo --start-tasks 31".split()
    order = [*methods.ARMS]  # a run comes after those it takes from, else one job waits
    assert all(order.index(other) < order.index(arm)
               for arm in order for other in methods.needed_by(methods.ARMS[arm]))
    made_run(tmp_path / "coevolve-s4", [[0]])
    with pytest.raises(UsageError, match="the target was not trained"):
        methods.filled(methods.ARMS["eto-steps"], tmp_path, 4)


def test_each_arm_has_settings_that_its_method_reads(begun, tmp_path):
    study.make_runs("webshop", methods.ARMS, [], tmp_path, [], 1)
