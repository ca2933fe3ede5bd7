"""The study: statistics by hand, the order of its runs, and reports on handmade runs."""

import json
import math
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
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
from lab.study import changes, compare, methods, numbers, study


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
    found = numbers.paired(a, b)
    assert found["mean"] == pytest.approx(mean) and found["half"] == pytest.approx(half, abs=1e-3)
    assert (found["ahead"], found["sure"]) == (ahead, sure)
    assert compare.cell(numbers.paired({3: 1.0}, {3: 0.25})) == "+0.750"  # one seed has no interval
    assert numbers.paired({3: 1.0}, {4: 0.0}) is None


def test_mean_distance_by_hand():
    """Unit vectors at 0, 60 and 90 degrees: cosines 1/2, 0 and cos 30; lengths do not matter."""
    vectors = np.array([[2.0, 0.0], [0.5, math.sqrt(0.75)], [0.0, 3.0]])
    assert numbers.mean_distance(vectors) == pytest.approx(1 - (0.5 + 0 + math.sqrt(0.75)) / 3)
    rows = [dict(task=t, reward=r, at=k, action_mask=[k < 9]) for t, r, k in (
        ("a", .5, 9), ("a", .5, 0), ("a", .5, 2), ("a", 1., 1), ("b", .5, 0), ("c", 1., 0),
        ("c", 1., 1))]
    found = numbers.distances(rows, lambda row: vectors[row["at"]])
    assert found == pytest.approx({"a": 1.0})


def test_an_embedding_is_the_mean_state_of_the_action_tokens(small_model):
    """The states are those of the base model in transformers."""
    ids, mask = [5, 9, 11, 7, 30, 8, 6], [0, 0, 0, 1, 1, 0, 1]
    states = AutoModel.from_pretrained(small_model)(torch.tensor([ids])).last_hidden_state[0]
    found = numbers.embedder(small_model)(dict(ids=ids, action_mask=mask))
    assert found == pytest.approx(states[[3, 4, 6]].mean(0).tolist(), abs=1e-5)


# ------------------------------------------------------------------------------ runs by hand


def made_run(folder, rewards, finished=True, splits=("test",), **settings):
    """Writes a run whose target has these rewards on two tasks of each split after each iteration,
    with one list for each split. In iteration i it explored one task, with the first of these
    rewards, and took 10 i steps."""
    phases, files = {}, {}
    for i, of_splits in enumerate(rewards):
        for split, of_tasks in zip(splits, of_splits if len(splits) > 1 else [of_splits]):
            output = f"eval-{i}-target-{split}.jsonl"
            phases[output] = dict(name="target", i=i, split=split, episodes=2, turns=1.0, hard_negative=0.0,
                                  reward=0.0, success=0.0, seconds=0.0)  # what the file says counts
            files[output] = of_tasks
            if i and split == splits[0]:
                phases[f"iter{i}/target.jsonl"] = dict(
                    name="target", i=i, episodes=1, reward=0.5, success=0.0, hard_negative=0.0, seconds=0.0)
                files[f"iter{i}/target.jsonl"] = of_tasks[:1]
                phases[f"iter{i}/target-agent"] = dict(name="target", i=i, steps=10 * i,
                                                       tokens=900, seconds=0.0)
                phases[f"iter{i}/failure-agent"] = dict(name="failure", i=i, steps=3, seconds=0.0)
    write_run(folder, phases, **settings)
    for output, of_tasks in files.items():
        write_lines(folder / output, [
            trajectory(f"webshop-train-{n}", "target", reward, ["x"]) | dict(
                ids=[5, 9, 11, 7 + n], action_mask=[0, 0, 1, 1]) for n, reward in enumerate(of_tasks)])
    if finished:
        (folder / "result.json").write_text("{}")
    return folder


def rows_of(folder, title, **wanted):
    """Returns the rows of the report's table whose title starts with `title`."""
    made = json.loads((folder / "report.json").read_text())
    rows = next((rows for name, rows in made.items() if name.startswith(title)), [])
    return [row for row in rows if wanted.items() <= row.items()]


def test_the_last_iteration_and_all_iterations(tmp_path, capsys):
    """After the last iteration co-evolution has 1 and 0, and ETO 0 and 0.25. The differences 1 and
    -0.25 have the mean 0.375 and the half width 12.7062 x 0.625."""
    curves = {"coevolve": [[0, 0, .5, 1], [0, .75, 0, 0]], "eto": [[0, .25, 0], [0, 0, .25]], "sft": [[1]] * 2}
    for arm, seeds in curves.items():
        for seed, rewards in enumerate(seeds):
            made_run(tmp_path / f"{arm}-s{seed}", [[reward] for reward in rewards], method=arm, seed=seed)
    study.main(["webshop", "--report", "--out", str(tmp_path)])
    folder = tmp_path / "report"
    [row] = rows_of(folder, "Greedy evaluation of the target", method="coevolve")
    assert (row["iterations"], row["reward"]["mean"]) == ("3 3", 0.5)
    [row] = rows_of(folder, "Differences on the same seeds", difference="coevolve - eto", split="test")
    assert row["reward"] == pytest.approx(dict(n=2, mean=0.375, half=12.7062 * 0.625, ahead=1, sure=False))
    assert rows_of(folder, "Over iterations", method="eto", iteration=2, split="test")[0]["reward"]["mean"] == 0.125
    said = capsys.readouterr().out
    assert "+0.375 ± 7.941 (1 of 2)" in said and (folder / "curves.svg").read_bytes().startswith(b"<?xml")


def test_the_tables_of_exploration_and_cost(tmp_path, small_model):
    """The explored rewards are 1, 0.65 and 0.25. Distances are between failures of one task."""
    for arm in "coevolve", "eto":
        run = made_run(tmp_path / f"{arm}-s3", [[0, 0], [1.0, 0], [0.65, 0], [0.25, 0]], method=arm, seed=3)
        (run / "sft-target").symlink_to(small_model)
    study.main(["webshop", "--report", "--out", str(tmp_path)])
    folder = tmp_path / "report"
    shares = [[round(row[name]["mean"], 3) for name in ("success", "negative", "hard negative")]
              for row in rows_of(folder, "Table 2", method="eto")]
    assert shares == [[0.333, 0.333, 0.333], [0.333, 0.667, 0.0], [0.333, 0.667, 0.0]]
    assert rows_of(folder, "Table 2", method="coevolve - eto")[0]["success"]["mean"] == 0
    assert rows_of(folder, "Figure 3", agent="eto")[0] == dict(
        agent="eto", instructions=1, **{"mean of seeds": dict(n=1, mean=pytest.approx(0, abs=1e-6), half=None)})
    assert (folder / "figure3.svg").exists()
    assert rows_of(folder, "What it took", method="eto") == [{
        "method": "eto", "steps of the target": 60, "steps of all agents": 69,
        "tokens of the target": 2700, "rollouts": 3, "tasks": 0}]
    assert "±" not in (folder / "report.txt").read_text()  # of one seed


@pytest.mark.parametrize("arm, changed, says", [
    ("eto", dict(dpo_steps=9), "differ in dpo_steps (0, 9)"),
    ("eto", dict(lambda_sft=0.0), None),  # its preset
    ("eto-steps", dict(rollouts=4, dpo_steps=9), "differ in rollouts (4, 2)"),
    ("sft", dict(method="sft", dpo_steps=9), None),  # SFT does not read it
    ("positive", dict(method="positive", dpo_steps=9), "differ in dpo_steps (9, 0)")])
def test_a_report_on_runs_of_different_settings_is_refused(tmp_path, arm, changed, says):
    same = dict(lambda_sft=0.1, d_fail="all", dpo_steps=0, start_tasks=0)
    made_run(tmp_path / "positive-s3", [], **same, method="positive", seed=3)
    made_run(tmp_path / f"{arm}-s9", [], **{**same, "method": "eto", **changed}, seed=9)
    if says is None:
        assert {*methods.finished(tmp_path)} == {"positive", arm}
        return
    with pytest.raises(UsageError) as error:
        study.main(["webshop", "--report", "--out", str(tmp_path)])
    assert says in str(error.value)


def compared(tmp_path, *words):
    compare.main([*map(str, words), "--out", str(tmp_path / "report")])
    return tmp_path / "report"


def test_variants_of_one_method_and_seed_are_compared_by_hand(tmp_path):
    """base: 0.5 on seed 3, 0.75 on seed 4. ipo: 0.75 and 0.75, and 0 on a seed of its own. So means
    0.625 and 0.5, and ipo - base 0.25 and 0: mean 0.125, half of the interval 12.7062 / 8."""
    for name, seed, last, more in (
            ("base", 3, [1.0, 0.0], {}), ("base", 4, [1.0, 0.5], {}),
            ("ipo", 3, [0.5, 1.0], dict(beta=0.3, gamma=1.0)),
            ("ipo", 4, [1.0, 0.5], dict(beta=0.3, gamma=1.0, slots=7)),
            ("ipo", 5, [0.0, 0.0], dict(beta=0.3, gamma=1.0))):
        made_run(tmp_path / f"{name}{seed}", [[0.0, 0.0], last], method="eto", seed=seed,
                 **{"beta": 0.1, "slots": 1, **more})
    folder = compared(tmp_path, *(f"{name[:-1]}={tmp_path / name}" for name in
                                  ("base3", "base4", "ipo3", "ipo4", "ipo5")))
    assert [tuple(row.values()) for row in rows_of(folder, "Settings in which they differ")] == [
        ("beta", "base", "0.1"), ("beta", "ipo", "0.3"), ("gamma", "base", "-"), ("gamma", "ipo", "1.0")]
    first, second = rows_of(folder, "Greedy")
    assert (first["method"], first["seeds"], second["seeds"]) == ("base", "3 4", "3 4 5")
    assert (first["reward"]["mean"], second["reward"]["mean"]) == pytest.approx((0.625, 0.5))
    [row] = rows_of(folder, "Differences")
    assert row["difference"] == "ipo - base"
    assert row["reward"] == pytest.approx(dict(n=2, mean=0.125, half=12.7062 / 8, ahead=1, sure=False))
    with pytest.raises(UsageError, match="ipo3 and .*base3 are both a with seed 3; leave one out"):
        compared(tmp_path, f"a={tmp_path / 'base3'}", f"a={tmp_path / 'ipo3'}")


def test_an_emptied_evaluation_is_skipped_and_a_model_is_no_run(tmp_path):
    own = made_run(tmp_path / "own", [[0.5, 0.0], [0.5, 0.5]], method="votes", seed=3, pages=7)
    (own / "eval-1-target-test.jsonl").write_text("")
    assert [row["iteration"] for row in rows_of(compared(tmp_path, own), "Over")] == [0]
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match="agent: not a run"):
        compared(tmp_path, f"mine={tmp_path / 'agent'}")


def notes_of(folder):
    return {row["method"]: row["note"] for row in rows_of(folder, "Runs to note")}


def test_an_unfinished_run_is_marked_and_compared_after_the_last_iteration_of_both(tmp_path):
    """The fork has 0.25 after its first iteration, which is compared with 0.5 after the base's
    first one, not with 0.75 after its second. Finished runs are compared after their last ones."""
    base = made_run(tmp_path / "base", [[0, 0], [1.0, 0], [1.0, 0.5]], method="eto", seed=3)
    going = made_run(tmp_path / "going", [[0, 0], [0.5, 0]], False, method="eto", seed=3)
    words = f"base={base}", f"fork={going}"
    folder = compared(tmp_path, *words)
    [row] = rows_of(folder, "Differences")
    assert (row["iterations"], row["reward"]["mean"]) == ("1", pytest.approx(0.25 - 0.5))
    assert notes_of(folder) == {"fork": "unfinished, iteration 1"}
    config = json.loads((going / "config.json").read_text())
    (going / "config.json").write_text(json.dumps(config | dict(finished=True)))
    folder = compared(tmp_path, *words)
    [row] = rows_of(folder, "Differences")
    assert (row["iterations"], row["reward"]["mean"]) == ("1 - 2", pytest.approx(0.25 - 0.75))
    assert not notes_of(folder)


def test_other_tasks_environments_and_seeds_are_not_compared(tmp_path, capsys):
    """Of tasks 0 to 2 and 0 to 1 the first two are compared: 0.75 with 0.5, 1 success in 2 with 0."""
    base = made_run(tmp_path / "base", [[0, 0], [1.0, 0.5, 0]], method="eto", seed=3)
    fork = made_run(tmp_path / "fork", [[0, 0], [0.5, 0.5]], method="eto", seed=3)
    folder = compared(tmp_path, f"base={base}", f"fork={fork}")
    said = capsys.readouterr().out
    assert "tasks of test differ: base has 3; the 2 that all have are compared." in said
    assert [row["reward"]["mean"] for row in rows_of(folder, "Greedy")] == [0.75, 0.5]
    [row] = rows_of(folder, "Differences")
    assert (row["reward"]["mean"], row["success"]["mean"]) == (-0.25, -0.5)

    other = made_run(tmp_path / "other", [[0, 0]], method="eto", seed=3, env="intercodesql")
    with pytest.raises(UsageError, match="other is a run of intercodesql, and .*base of webshop"):
        compared(tmp_path, base, f"other={other}")
    config = json.loads((fork / "config.json").read_text())
    config["branch"] = dict(seed=2)
    (fork / "config.json").write_text(json.dumps(config))
    folder = compared(tmp_path, f"base={base}", f"fork={fork}")
    assert not rows_of(folder, "Differences")
    assert [row["seeds"] for row in rows_of(folder, "Greedy")] == ["3", "2>3"]


def test_an_agent_is_known_by_its_recorded_name(tmp_path):
    """The target takes 10 steps, and the agent failure-target 3 more. An agent with another name than
    target is listed with its name."""
    run = made_run(tmp_path / "run", [[0, 0], [1.0, 0]], method="eto", seed=3)
    phases = json.loads((run / "phases.json").read_text())
    phases["iter1/failure-target-agent"] = phases.pop("iter1/failure-agent") | dict(
        name="failure-target")
    (run / "phases.json").write_text(json.dumps(phases))
    own = made_run(tmp_path / "own", [[0, 0], [1.0, 0]], method="eto", seed=3)
    text = (own / "phases.json").read_text()
    (own / "phases.json").write_text(text.replace('"target"', '"pupil\\u001b[2J"'))
    folder = compared(tmp_path, f"run={run}", f"own={own}")
    [row] = rows_of(folder, "What it took", method="run")
    assert (row["steps of the target"], row["steps of all agents"]) == (10, 13)
    assert [row["method"] for row in rows_of(folder, "Greedy")] == ["run", "own: pupil\x1b[2J"]
    text = (folder / "report.txt").read_text()
    assert "own: pupil<1B>[2J" in text and "\x1b" not in text


def test_the_report_starts_with_the_differences(tmp_path, capsys):
    """For identical runs it prints that nothing differs."""
    runs = {name: made_run(tmp_path / name, [[0, 0], [1.0, 0.5]], method="eto", seed=3)
            for name in ("base", "same", "loss", "pairs")}
    log = [dict(step=1, loss=0.9, dpo=0.7, sft=0.2, norm=3.0)]
    rows = [dict(task="a", kind=kind, chosen={}, rejected={}, weight=0.5, sft_weight=0.0)
            for kind in ("expert>target", "failure>failure")]
    for name, run in runs.items():
        phases = json.loads((run / "phases.json").read_text())
        order = {"iter1/pairs-target.jsonl": dict(seconds=0.0, trains="target", pairs={}),
                 "iter1/target-agent": phases.pop("iter1/target-agent")}
        (run / "phases.json").write_text(json.dumps(order | phases))
        kept = rows[:1] if name == "pairs" else rows
        write_lines(run / "iter1/pairs-target.jsonl", kept)
        log[0]["norm"] = 2.4 if name == "loss" else 3.0
        write_lines(run / "iter1/target-agent/train.jsonl", log)
        code = dict(commit="a" * 40, files={"dpo.py": name} if name == "loss" else {})
        config = json.loads((run / "config.json").read_text()) | dict(code=code)
        (run / "config.json").write_text(json.dumps(config))
    played = runs["loss"] / "eval-1-target-test.jsonl"
    played.write_text(played.read_text().replace('"reward": 0.5', '"reward": 0.0'))
    folder = compared(tmp_path, *(f"{name}={run}" for name, run in runs.items()))
    found = {(row["method"], row["what"]): row["difference"]
             for row in rows_of(folder, "What differs from base")}
    for name in ("same", "loss", "pairs"):
        assert found[name, "settings"] == "none differ"
        assert found[name, "code"] == ("dpo.py" if name == "loss" else "none differs")
    assert found["same", "first output, seed 3"] == "no output of both differs"
    assert found["loss", "first output, seed 3"] == (
        "iter1/target-agent: first loss 0.9 -> 0.9; first dpo 0.7 -> 0.7; first sft 0.2 -> 0.2; "
        "first norm 3 -> 2.4; the same weights")
    assert found["pairs", "first output, seed 3"] == (
        "iter1/pairs-target.jsonl: 2 pairs (1 expert>target, 1 failure>failure) -> "
        "1 pair (1 expert>target)")
    assert found["same", "greedy episodes, seed 3"] == "all 2 are identical, iteration 1"
    assert found["loss", "greedy episodes, seed 3"] == "1 of 2 have other text, iteration 1"
    of_pairs = {row["difference"]: row["reward"] for row in rows_of(folder, "Differences")}
    assert (of_pairs["same - base"]["mean"], of_pairs["loss - base"]["mean"]) == (0, -0.25)
    said = capsys.readouterr().out
    assert said.index("What differs from base") < said.index("Greedy evaluation")


def test_weights_of_different_shapes_have_no_numeric_difference(tmp_path):
    for name, values in ("a", [1.0, 2.0]), ("b", [1.25, 1.5]), ("c", [1.0, 2.0, 3.0]):
        (tmp_path / name).mkdir()
        save_file({"w": torch.tensor(values)}, tmp_path / name / "model.safetensors")
    a, b, c = (tmp_path / name for name in "abc")
    assert changes.agent_change(a, a) == ""
    assert changes.agent_change(a, b) == "weights differ by at most 0.5"
    assert changes.agent_change(a, c) == "other names or shapes of weights"


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
    two, events, futures, fails = threading.Barrier(2), [], [], True

    class Pool(ThreadPoolExecutor):
        def submit(self, *work):
            futures.append(super().submit(*work))
            return futures[-1]

    def launch(env, words, log):
        name = Path(words[-1]).name
        events.append(f"{name} begins")
        if fails:
            two.wait(LIMIT)  # neither run can end alone
        if fails and name == "eto-s3":
            raise UsageError("eto-s3 ended with status 2")
        if fails:
            wait_until(lambda: any(future.done() for future in futures), "eto-s3 to fail")
        else:
            time.sleep(0.1)
        events.append(f"{name} ends")

    monkeypatch.setattr(study, "launch", launch)
    monkeypatch.setattr(study, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(methods, "taken_from",
                        lambda run: events.append(f"{run.name} is read") or dict(steps=7))
    with pytest.raises(UsageError, match="eto-s3 ended with status 2"):
        study.make_runs("webshop", ["coevolve", "eto", "eto-steps", "ppo"], [3, 4], tmp_path, [], 2)
    # The other run ended normally, and no further run was started.
    assert sorted(events) == ["coevolve-s3 begins", "coevolve-s3 ends", "eto-s3 begins"]
    events, fails = [], False
    study.make_runs("webshop", ["coevolve", "eto-steps", "ppo"], [3, 4], tmp_path, [], 3)
    for seed in (3, 4):
        order = [events.index(e) for e in (f"coevolve-s{seed} ends", f"coevolve-s{seed} is read",
                                           f"eto-steps-s{seed} begins")]
        assert order == sorted(order)
    assert len(events) == 2 * 6 + 2


def test_no_run_starts_after_one_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "ROOT", tmp_path)
    (tmp_path / "run.sh").write_text("echo $*; exit 2")
    with pytest.raises(UsageError, match=f"sft-s3 ended with status 2; {tmp_path}/sft-s3.log has"):
        study.make_runs("webshop", ["sft", "eto"], [3, 4], tmp_path, ["--rollouts", "2"], 1)
    assert [file.name for file in tmp_path.glob("*.log")] == ["sft-s3.log"]
    assert (tmp_path / "sft-s3.log").read_text().startswith("webshop --")


def test_a_study_runs_each_arm_on_each_seed_with_its_flags(begun, tmp_path):
    """The target of coevolve takes 10 and 20 steps on seed 0, 15 on average, and 10 on seed 1."""
    made_run(tmp_path / "coevolve-s0", [[0], [0], [0]], seed=0, method="coevolve", lambda_sft=0.2)
    made_run(tmp_path / "coevolve-s1", [[0], [0]], seed=1, method="coevolve", lambda_sft=0.2)
    study.main(["webshop", "--jobs", "1", "--methods", "eto-sft-steps", "frozen", "--seeds", "0", "1",
                "--out", str(tmp_path), "--rollouts", "2"])
    assert begun == [f"--rollouts 2 {flags} --seed {seed} --out {tmp_path}/{arm}-s{seed}"
                     for seed, steps in ((0, 15), (1, 10)) for arm, flags in (
        ("coevolve", "--method coevolve"),
        ("eto-sft-steps", "--method eto --lambda-sft 0.2 --pair-weights instruction --dpo-steps "
                          f"{steps}"), ("frozen", "--method coevolve --d-fail none"))]
    write_run(tmp_path / "evolve-s3", {f"iter{i}/tasks.jsonl": dict(tasks=d)
                                       for i, d in enumerate((7, 31))}, method="evolve")
    assert methods.flags("grpo-tasks", tmp_path, 3) == "--method grpo --start-tasks 31".split()
    order = [*methods.ARMS]  # a run comes after those it takes from, else one job waits
    assert all(order.index(other) < order.index(arm)
               for arm in order for other in methods.needed_by(arm))
    made_run(tmp_path / "coevolve-s4", [[0]])
    with pytest.raises(UsageError, match="the target was not trained"):
        methods.flags("eto-steps", tmp_path, 4)
