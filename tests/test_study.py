"""The study: statistics by hand, the order of its runs, and reports on handmade runs."""

import json
import math
import os
import shutil
import signal
import threading
from operator import itemgetter
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from conftest import LIMIT, ended, fork, refusal, refused, table, wait_until
from safetensors.torch import save_file
from test_report import texts, trajectory, write_lines, write_run
from transformers import AutoModel

from lab.study import compare, methods, numbers, study

# ------------------------------------------------------------------------------ statistics


@pytest.mark.parametrize("row", table("""
    [0.6, 0.8, 1.0] -> [0.5, 0.6, 0.7] -> 0.2 -> 0.2484 -> 3 -> 0.0742
    [0.5, 0.6] -> [0.5, 0.8] -> -0.1 -> 1.2706 -> 0 -> 0.5
    [1, 2, 3, 4, 5] -> [0, 0, 0, 0, 0] -> 3 -> 1.9632 -> 5 -> 0.0132
    [0.5, 0.5] -> [0.5, 0.5] -> 0 -> 0 -> 0 -> 1"""))
def test_differences_by_hand(row):
    """A row has both arms, and of their differences the mean, half of the t interval's width, the
    number above 0, and p.

    The differences 0.1, 0.2, 0.3 have the variance 0.01, and the half width 4.303 x 0.1 / sqrt(3).
    With two degrees of freedom p = 1 - t / sqrt(2 + t^2), and t = 0.2 sqrt(3) / 0.1 = 3.464. With
    0.0 and -0.2, the half width is 12.706 x 0.1, and t = 1. With one degree of freedom, p = 1/2.
    With 1, 2, 3, 4, 5, the variance is 2.5, the half width 2.776 sqrt(2.5 / 5), and t = 4.243.
    """
    a, b, *expected = map(json.loads, row)
    found = numbers.interval([(dict(x=[x]), dict(x=[y])) for x, y in zip(a, b)], "x")
    found = [found["mean"], found["half"], found["ahead"], numbers.p_value(found)]
    assert found == pytest.approx(expected, abs=1e-4)


def test_holm_by_hand():
    """In ascending order: 0.01 x 5 = 0.05, 0.03 x 4 = 0.12, 0.035 x 3, raised to 0.12, 0.6 x 2, cut
    to 1, and 0.7 x 1, raised to 1."""
    assert numbers.holm([.01, .035, .03, .6, .7]) == pytest.approx([.05, .12, .12, 1, 1])


def test_bootstrap_draws_seeds_and_the_same_tasks_for_all_seeds():
    """The oracle draws seeds and tasks literally, and averages two environments."""
    rng = np.random.default_rng(5)
    values = rng.normal(size=(3, 2, 1)) + rng.normal(0, 2, (2, 5))  # seeds, environments, tasks
    samples = []
    for _ in range(6000):
        seeds = rng.integers(3, size=3)
        drawn = [values[seeds, k][:, rng.integers(5, size=5)] for k in range(2)]
        samples.append(np.mean(drawn))
    expected = np.percentile(samples, [2.5, 97.5])
    assert [*numbers.bootstrap(values).values()] == pytest.approx(expected, abs=0.09)


def test_mean_distance_by_hand():
    """The failures of task a are at 0, 60 and 90 degrees: cosines 1/2, 0 and cos 30. A success, a
    failure without an action, and the only failure of a task have no distance."""
    row = dict(task="a", reward=0.5, action_mask=[1], state=[2.0, 0.0])
    changes = (dict(state=[0.5, math.sqrt(0.75)]), dict(state=[0.0, 3.0]), dict(reward=1.0),
               dict(action_mask=[0]), dict(task="b"))
    found = numbers.distances([row, *(row | change for change in changes)], itemgetter("state"))
    assert found == pytest.approx({"a": 1 - (0.5 + 0 + math.sqrt(0.75)) / 3})


def test_an_embedding_is_the_mean_state_of_the_action_tokens(small_model):
    """The states are those of the base model in transformers."""
    ids, mask = [5, 9, 11, 7], [0, 1, 0, 1]
    states = AutoModel.from_pretrained(small_model)(torch.tensor([ids])).last_hidden_state[0]
    found = numbers.embedder(small_model)(dict(ids=ids, action_mask=mask))
    assert found == pytest.approx(states[[1, 3]].mean(0).tolist(), abs=1e-5)


# ------------------------------------------------------------------------------ runs by hand


def made_run(folder, rewards, finished=True, target="target", failure=(), **settings):
    """Writes a run whose target has these rewards after each iteration. `failure` are the rewards
    of a second agent. In iteration i each agent explored one task, with the first of the rewards,
    and took 10 i steps."""
    phases, of_files = {}, {}
    for name, of_agent in (target, rewards), ("failure", failure):
        for i, of_tasks in enumerate(of_agent):
            record = dict(name=name, i=i, seconds=0.0)
            played = record | dict(episodes=1, reward=0.0, success=0.0, hard_negative=0.0)
            evaluation, exploration = f"eval-{i}-{name}-test.jsonl", f"iter{i}/{name}.jsonl"
            phases[evaluation] = played | dict(split="test")
            of_files[evaluation] = of_tasks
            if i:
                phases[exploration] = played
                of_files[exploration] = of_tasks[:1]
                phases[f"iter{i}/pairs-{name}.jsonl"] = dict(
                    seconds=1.0, pairs={"expert>target": 2})
                phases[f"iter{i}/{name}-agent"] = record | dict(
                    steps=10 * i, tokens=900, first_loss=0.9)
    write_run(folder, phases, of_files, **dict(method="eto", seed=3) | settings)
    if finished:
        (folder / "result.json").write_text("{}")
    return folder


def shown(folder, title, columns):
    """Returns columns of the report's table whose title contains `title`."""
    made = json.loads((folder / "report.json").read_text())
    rows = next((rows for name, rows in made.items() if title in name), [])
    return texts(rows, columns, compare.cell)


def lines(text):
    return [*map(str.strip, text.strip().splitlines())]


def compared(tmp_path, *words):
    compare.main([*map(str, words), "--out", str(tmp_path / "report")])
    return tmp_path / "report"


def changed(folder, **config):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


def test_the_tables_of_exploration_cost_and_iterations(tmp_path, small_model):
    """The explored rewards of the targets are 1, 0.65 and 0.25. One seed has no interval over
    seeds, also in the picture."""
    for arm, failure in ("coevolve", [[0, 0], [0, 0], [0.5, 0], [0.5, 0]]), ("eto", []):
        run = made_run(tmp_path / f"{arm}-s3", [[0, 0], [1.0, 0], [0.65, 0], [0.25, 0]], method=arm,
                       failure=failure)
        (run / "sft-target").symlink_to(small_model)
    study.main(["webshop", "--report", "--out", str(tmp_path)])
    folder = tmp_path / "report"
    over = shown(folder, "Over iterations", "method, agent, iteration, reward")
    assert len(over) == 12 and "coevolve -> failure -> 2 -> 0.250 [0.000, 0.500]" in over
    assert shown(folder, "Table 2", "method, threshold, success, negative, hard negative") == lines("""
        coevolve -> 0.6 -> 0.167 -> 0.667 -> 0.167
        coevolve -> 0.7 -> 0.167 -> 0.833 -> 0.000
        coevolve -> 0.8 -> 0.167 -> 0.833 -> 0.000
        eto -> 0.6 -> 0.333 -> 0.333 -> 0.333
        eto -> 0.7 -> 0.333 -> 0.667 -> 0.000
        eto -> 0.8 -> 0.333 -> 0.667 -> 0.000
        coevolve - eto -> 0.6 -> -0.167 -> +0.333 -> -0.167
        coevolve - eto -> 0.7 -> -0.167 -> +0.167 -> +0.000
        coevolve - eto -> 0.8 -> -0.167 -> +0.167 -> +0.000""")
    assert shown(folder, "What it took", ", ".join(["method", *numbers.COSTS])) == lines("""
        coevolve -> 60 -> 120 -> 2,700 -> 6.000
        eto -> 60 -> 60 -> 2,700 -> 3.000""")
    assert shown(folder, "Figure 3", "method") == [
        "eto", "coevolve: target", "coevolve: failure", "coevolve: failure - eto"]
    assert "interval" not in (folder / "curves-webshop.svg").read_text()


@pytest.mark.parametrize("arm, change, line", table("""
    eto -> {"dpo_steps": 9} -> differ in dpo_steps (0, 9)
    eto -> {"lambda_sft": 0.0} ->
    eto-steps -> {"dpo_steps": 9} ->
    eto-sft -> {"lambda_sft": 0.5} -> differ in lambda_sft (0.5, 0.1)
    sft -> {"method": "sft", "dpo_steps": 9} ->"""))
def test_a_report_on_runs_of_different_settings_is_refused(tmp_path, arm, change, line):
    """A preset sets lambda_SFT of ETO. The arm eto-steps has a number of steps for each seed, but
    eto-sft has one lambda_SFT. SFT does not read the number of steps."""
    same = dict(lambda_sft=0.1, d_fail="all", dpo_steps=0, start_tasks=0)
    made_run(tmp_path / "positive-s3", [], **same, method="positive")
    if arm.startswith("eto-"):
        made_run(tmp_path / f"{arm}-s4", [], **same, seed=4)
    made_run(tmp_path / f"{arm}-s9", [], **same | json.loads(change), seed=9)
    if line:
        assert line in refusal(methods.finished, tmp_path)
    else:
        assert {*methods.finished(tmp_path)["webshop"]} == {"positive", arm}


def test_runs_of_one_name_are_seeds_and_only_settings_that_are_read_differ(tmp_path):
    """`slots` changes nothing but rounding, ETO does not read `d_fail`, and a copy of the program
    has a setting of its own, gamma."""
    words, fork = [], dict(beta=0.3, gamma=1.0)
    runs = dict(base3=dict(d_fail="all"), base4=dict(slots=7), ipo3=fork, ipo4=fork, ipo5=fork)
    for name, more in runs.items():
        seed = int(name[-1])
        made_run(tmp_path / name, [[seed / 10]], seed=seed, **dict(beta=0.1, slots=1) | more)
        words.append(f"{name[:-1]}={tmp_path / name}")
    folder = compared(tmp_path, *words)
    assert shown(folder, "Settings in which they differ", "setting, method, value") == lines("""
        beta -> base -> 0.1
        beta -> ipo -> 0.3
        gamma -> base -> -
        gamma -> ipo -> 1.0""")
    assert shown(folder, "Evaluation", "method, seed, reward") == lines("""
        base -> 3, 4 -> 0.350 ± 0.635 [0.300, 0.400]
        ipo -> 3, 4, 5 -> 0.400 ± 0.248 [0.300, 0.500]
        ipo - base -> 3, 4 -> +0.000 ± 0.000 [+0.000, +0.000] (0 of 2)""")


def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path, small_model):
    base = made_run(tmp_path / "base", [[0, 0], [1.0, 0.5]], eval_splits="test")
    more = made_run(tmp_path / "more", [[0, 0, 0]], eval_splits="test")
    dev = made_run(tmp_path / "dev", [[0, 0]], eval_splits="validation")
    refused(lambda *words: compared(tmp_path, *words), [
        (f"{base} eto={more}", "both eto with seed 3; leave one out"),
        (f"{base} {small_model}", "not a run"),
        (f"{base} x={more}", "test.jsonl has 3 tasks, which are not the 2 of"),
        (f"{base} x={dev}", f"--eval-splits validation, and {base} test")])


def test_notes_unfinished_runs_branches_of_other_seeds_and_emptied_files(tmp_path):
    base = made_run(tmp_path / "base", [[0, 0], [1.0, 0], [1.0, 0.5]])
    fork = made_run(tmp_path / "fork", [[0, 0], [0.5, 0]], False)
    folder = compared(tmp_path, f"base={base}", f"fork={fork}")
    assert shown(folder, "Evaluation", "method, iteration, reward") == lines("""
        base -> 2 -> 0.750 [0.500, 1.000]
        fork -> 1 -> 0.250 [0.000, 0.500]
        fork - base -> 1 - 2 -> -0.500 [-0.500, -0.500]""")
    notes = shown(folder, "Runs to note", "method, note")
    assert notes == ["fork -> unfinished, iteration 1"]
    changed(fork, finished=True, branch=dict(seed=2))
    (fork / "eval-1-target-test.jsonl").write_text("")
    compared(tmp_path, f"base={base}", f"fork={fork}")
    assert not shown(folder, "Runs to note", "method")
    assert shown(folder, "Evaluation", "seed, iteration") == ["3 -> 2", "2>3 -> 0"]


def test_several_environments_have_their_own_tables_and_an_average(tmp_path):
    """On WebShop's two tasks the difference is 1/2 with each of three seeds. On three tasks of
    InterCodeSQL it is 1/2, 1/4 and 1/2, so t = (5/12) / (1/12) = 5, and p = 1 - 5 / sqrt(27). One
    of 27 samples has the second seed alone."""
    shop, sql = tmp_path / "webshop", tmp_path / "intercodesql"
    for folder, tasks, coevolve, frozen in (shop, 2, .5, (0, 0, 0)), (sql, 3, 1, (.5, .75, .5)):
        for seed, reward in enumerate(frozen):
            for arm, last in ("coevolve", coevolve), ("frozen", reward):
                made_run(folder / f"{arm}-s{seed}", [[0] * tasks, [last] * tasks],
                         method="coevolve", seed=seed, env=folder.name)
    folder = compared(tmp_path, shop, sql)
    for title, expected in (
            ("webshop: Eval", """
        coevolve -> 0.500 ± 0.000 [0.500, 0.500]
        frozen -> 0.000 ± 0.000 [0.000, 0.000]
        coevolve - frozen -> +0.500 ± 0.000 [+0.500, +0.500] (3 of 3)"""),
            ("intercodesql: Eval", """
        coevolve -> 1.000 ± 0.000 [1.000, 1.000]
        frozen -> 0.583 ± 0.359 [0.500, 0.750]
        coevolve - frozen -> +0.417 ± 0.359 [+0.250, +0.500] (3 of 3)"""),
            ("average of webshop, intercodesql: Eval", """
        coevolve -> 0.750 ± 0.000 [0.750, 0.750]
        frozen -> 0.292 ± 0.179 [0.250, 0.375]
        coevolve - frozen -> +0.458 ± 0.179 [+0.375, +0.500] (3 of 3)""")):
        assert shown(folder, title, "method, reward") == lines(expected)
    picture = (folder / "curves-intercodesql.svg").read_text()
    assert "95% t interval over seeds" in picture and "coevolve, seed 0 1 2" in picture
    _, tested = shown(folder, "corrected for 2 tests", "environment, difference, p, corrected p")
    assert tested == "intercodesql -> coevolve - frozen -> 0.0377 -> 0.0377"
    assert "in the same environment" in refusal(compared, tmp_path, shop, shop)


def test_agents_are_compared_by_role(tmp_path):
    """The target is called student in one run, which is evaluated first. In the other run the
    failure agent alone is another one."""
    rewards = dict(rewards=[[0, 0], [1.0, 0.5]], method="coevolve")
    base = made_run(tmp_path / "base", failure=[[0, 0], [0.5, 0]], **rewards)
    own = made_run(tmp_path / "own", failure=[[0, 0], [0.5, 0.5]], target="student\x1b[2J",
                   **rewards)
    folder = compared(tmp_path, f"base={base}", f"own\x1b[2J={own}")
    assert shown(folder, "Evaluation", "agent, reward")[4:] == lines("""
        target -> +0.000 [+0.000, +0.000]
        failure -> +0.250 [+0.000, +0.500]""")
    assert shown(folder, "What it took", "steps of the target") == ["10", "10"]
    assert shown(folder, "What differs", "what, difference") == lines("""
        settings -> none differ
        code -> (one of the runs has no record of its code)
        first output, seed 3 -> no output of both differs
        only in base, seed 3 -> eval-0-target-test.jsonl, eval-1-target-test.jsonl, iter1/target.jsonl, iter1/pairs-target.jsonl and 1 more
        only in own\x1b[2J, seed 3 -> eval-0-student\x1b[2J-test.jsonl, eval-1-student\x1b[2J-test.jsonl, iter1/student\x1b[2J.jsonl, iter1/pairs-student\x1b[2J.jsonl and 1 more
        episodes of target, test -> all 2 are identical, iteration 1
        episodes of failure, test -> 1 of 2 have other text, iteration 1""")
    text = (folder / "report.txt").read_text()
    assert "own<1B>[2J" in text and "\x1b" not in text


def test_a_sampled_evaluation_is_named_and_not_compared_with_greedy_episodes(tmp_path):
    """Two rollouts of the tasks earn 1 and 0, and 1 and 1: 0.75, where the run ended with 0.5."""
    base = made_run(tmp_path / "base", [[0, 0], [0.5, 0.5]], temperature=0.7)
    sampled = made_run(tmp_path / "sampled", [[]], method="evaluate", temperature=0.7)
    write_lines(sampled / "eval-0-target-test.jsonl", [
        trajectory(f"webshop-test-{task}", "target", reward)
        for task, reward in ((0, 1), (0, 0), (1, 1), (1, 1))])
    folder = compared(tmp_path, base, sampled)
    assert shown(folder, "Evaluation", "sampling, iteration, reward") == lines("""
        greedy -> 1 -> 0.500 [0.500, 0.500]
        temperature 0.7, 2 rollouts -> 0 -> 0.750 [0.500, 1.000]
        temperature 0.7, 2 rollouts - greedy -> 0 - 1 -> +0.250 [+0.000, +0.500]""")
    assert shown(folder, "What differs", "difference")[-1:] == [
        "not compared: temperature 0.7, 2 rollouts - greedy"]


def test_the_report_starts_with_the_differences(tmp_path, capsys):
    """Each run is a copy of the first one with other text in a file, or with other weights. The run
    `rounded` has other log-probabilities, which rounding changes."""
    base = made_run(tmp_path / "base", [[0, 0], [1.0, 0.5]])
    changed(base, code=dict(commit="a" * 40, files={}))
    write_lines(base / "iter1/pairs-target.jsonl", [dict(kind="expert>target")] * 2)
    weights = "iter1/target-agent/model.safetensors"
    (base / weights).parent.mkdir()
    save_file({"w": torch.tensor([1.0, 1.0])}, base / weights)
    for name in "rounded", "loss", "pairs", "size":
        shutil.copytree(base, tmp_path / name)
    save_file({"w": torch.tensor([1.0, 1.25])}, tmp_path / "loss" / weights)
    save_file({"w": torch.tensor([1.0])}, tmp_path / "size" / weights)
    for name, file, old, new in table("""
            rounded -> eval-1-target-test.jsonl -> "turns" -> "log_probs": [1], "turns"
            loss -> eval-1-target-test.jsonl -> "reward": 0.5 -> "reward": 0.0
            loss -> phases.json -> "first_loss": 0.9 -> "first_loss": 0.5
            loss -> config.json -> "files": {} -> "files": {"dpo.py": "changed"}
            pairs -> phases.json -> "expert>target": 2 -> "expert>target": 1
            pairs -> phases.json -> "seconds": 1.0 -> "seconds": 2.0
            pairs -> iter1/pairs-target.jsonl -> expert -> first"""):
        path = tmp_path / name / file
        path.write_text(path.read_text().replace(old, new, 1))
    names = "base rounded loss pairs size".split()
    folder = compared(tmp_path, *(f"{name}={tmp_path / name}" for name in names))
    assert shown(folder, "What differs from base", "method, what, difference") == lines("""
        rounded -> settings -> none differ
        rounded -> code -> none differs
        rounded -> first output, seed 3 -> no output of both differs
        rounded -> episodes of target, test -> all 2 are identical, iteration 1
        loss -> settings -> none differ
        loss -> code -> dpo.py
        loss -> first output, seed 3 -> iter1/target-agent: weights differ by at most 0.25, first_loss 0.9 -> 0.5
        loss -> episodes of target, test -> 1 of 2 have other text, iteration 1
        pairs -> settings -> none differ
        pairs -> code -> none differs
        pairs -> first output, seed 3 -> iter1/pairs-target.jsonl: 1 of 2 lines differ, 2 pairs (2 expert>target) -> 1 pair (1 expert>target)
        pairs -> episodes of target, test -> all 2 are identical, iteration 1
        size -> settings -> none differ
        size -> code -> none differs
        size -> first output, seed 3 -> iter1/target-agent: other sizes of weight files
        size -> episodes of target, test -> all 2 are identical, iteration 1""")
    said = capsys.readouterr().out
    assert said.index("What differs from base") < said.index("Evaluation after")


# ------------------------------------------------------------------------------ making runs


@pytest.fixture
def begun(monkeypatch):
    """The commands of the runs that a study started. They are not executed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a study sets it
    found = []
    monkeypatch.setattr(study, "launch", lambda env, words, log: found.append(" ".join(words)))
    return found


def test_errors_of_a_study_are_found_before_any_run(begun, tmp_path):
    refused(lambda *words: study.main(["webshop", *words, "--out", str(tmp_path / "none")]), [
        ("--methods sft eto --d-fail cross", "--d-fail is not read by --method"),
        ("--methods sft eto --temperature 0 --rollouts 2", "--temperature 0"),
        ("--seed 3", "--methods and --seeds"), ("--betta 1", "--betta 1"),
        ("--methods eto-sft --eto-lambda-sft -1", "--lambda-sft -1.0"),
        ("--report", "no finished run")])
    assert not begun and not (tmp_path / "none").exists()


@pytest.mark.parametrize("arm, arms, read", table("""
    sft -> sft eto frozen -> --quick --train-tasks 6 --webshop-url u
    eto -> sft eto frozen -> --iterations 2 --quick --beta=0.2 --train-tasks 6 --webshop-url u
    frozen -> sft eto frozen -> --iterations 2 --quick --beta=0.2 --train-tasks 6 --d-fail none --webshop-url u
    eto -> sft eto -> --iterations 2 --quick --beta=0.2 --train-tasks 6 --d-fail none --webshop-url u"""))
def test_a_method_is_given_the_settings_that_it_reads(arm, arms, read):
    """A setting that no method reads is given to all, so that it is refused."""
    more = "--iterations 2 --quick --beta=0.2 --train-tasks 6 --d-fail none --webshop-url u"
    assert study.read_by(arm, arms.split(), more.split()) == read.split()


def test_a_study_that_is_stopped_ends_its_runs(tmp_path, monkeypatch):
    """SIGTERM is sent to the study alone, while two runs sleep."""
    monkeypatch.setattr(study, "ROOT", tmp_path)
    (tmp_path / "run.sh").write_text("echo works $OMP_NUM_THREADS; exec sleep 600")
    said = tmp_path / "said"

    def work():
        os.environ.pop("OMP_NUM_THREADS", None)
        signal.signal(signal.SIGTERM, study.stop)
        study.main(f"webshop --methods sft --seeds 3 4 --jobs 2 --out {tmp_path}/out".split())

    process = fork(work, said)
    # The cores of a machine do not change what a study of the tiny model finds.
    wait_until(lambda: [log.read_text() for log in tmp_path.glob("out/*.log")] == ["works 1\n"] * 2,
               "both runs to write to their logs")
    family = psutil.Process(process).children(recursive=True)

    def is_stopped():
        os.kill(process, signal.SIGTERM)  # Python may miss the one that comes as a wait begins
        return said.read_text().endswith("rerun the same command to resume\n")

    wait_until(is_stopped, "the study to stop")
    assert ended(process) == 143 and len(family) == 2
    assert not psutil.wait_procs(family, timeout=300)[1]


def test_runs_are_concurrent_but_start_after_those_whose_steps_they_take(tmp_path, monkeypatch):
    two, events = threading.Barrier(2), []

    def launch(env, words, log):
        name = Path(words[-1]).name
        if name != "eto-steps-s3":
            two.wait(LIMIT)  # neither of the two other runs can end alone
        events.append(f"{name} ends")

    def taken_from(run):
        events.append(f"{run.name} is read")
        return dict(steps=7, tasks=7, lambda_sft=7)

    monkeypatch.setattr(study, "launch", launch)
    monkeypatch.setattr(methods, "taken_from", taken_from)
    arms = {arm: methods.ARMS[arm] for arm in ("coevolve", "eto-steps", "ppo")}
    study.make_runs("webshop", arms, [3], tmp_path, [], 3)
    events.remove("ppo-s3 ends")
    assert events == ["coevolve-s3 ends", "coevolve-s3 is read", "eto-steps-s3 ends"]
    # All arms have settings that their methods read, and come after the arms that they take from.
    monkeypatch.setattr(study, "launch", lambda *_: None)
    study.make_runs("webshop", methods.ARMS, [5], tmp_path, [], 1)


def test_no_run_starts_after_one_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "ROOT", tmp_path)
    (tmp_path / "run.sh").write_text("echo $*; exit 2")
    said = refusal(study.make_runs, "webshop", methods.ARMS, [3, 4], tmp_path, [], 1)
    assert f"coevolve-s3 ended with status 2; {tmp_path}/coevolve-s3.log has" in said
    log, = tmp_path.glob("*.log")
    assert log.read_text().startswith("webshop --")


@pytest.mark.parametrize("line, expected", [
    ("--methods eto-sft-steps frozen --seeds 0 1", """
        --method coevolve --seed 0 --out coevolve-s0
        --method eto --lambda-sft 0.2 --pair-weights instruction --dpo-steps 15 --seed 0 --out eto-sft-steps-s0
        --method coevolve --d-fail none --seed 0 --out frozen-s0
        --method coevolve --seed 1 --out coevolve-s1
        --method eto --lambda-sft 0.2 --pair-weights instruction --dpo-steps 10 --seed 1 --out eto-sft-steps-s1
        --method coevolve --d-fail none --seed 1 --out frozen-s1"""),
    ("--methods eto-sft-one --seeds 8 --eto-lambda-sft 0.5 --rollouts 2", """
        --rollouts 2 --method eto --lambda-sft 0.5 --pair-weights instruction --rollouts 1 --seed 8 --out eto-sft-one-s8"""),
    ("--methods grpo-tasks --seeds 3", """
        --method evolve --seed 3 --out evolve-s3
        --method grpo --start-tasks 31 --seed 3 --out grpo-tasks-s3""")])
def test_a_study_runs_each_arm_on_each_seed_with_its_flags(begun, tmp_path, line, expected):
    """The target of coevolve takes 10 and 20 steps on seed 0, 15 on average, and 10 on seed 1. ETO
    + SFT takes lambda_SFT of coevolve, unless it has its own, for which it needs no other run."""
    for seed, count in (0, 3), (1, 2):
        made_run(tmp_path / f"coevolve-s{seed}", [[0]] * count, seed=seed, method="coevolve",
                 lambda_sft=0.2)
    sizes = {f"iter{i}/tasks.jsonl": dict(tasks=size) for i, size in enumerate((7, 31))}
    write_run(tmp_path / "evolve-s3", sizes, method="evolve")
    study.main(f"webshop --jobs 1 --out {tmp_path} {line}".split())
    assert [words.replace(f"{tmp_path}/", "") for words in begun] == lines(expected)


def test_steps_of_an_untrained_target_are_refused(tmp_path):
    made_run(tmp_path / "coevolve-s4", [[0]])
    said = refusal(methods.filled, methods.ARMS["eto-steps"], tmp_path, 4)
    assert "the target was not trained" in said
