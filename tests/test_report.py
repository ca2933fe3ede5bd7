"""The numbers and the figure of handmade runs, and the functions that commands for runs share."""

import io
import json
import sys

import pytest

from common.files import file_hash
from lab import runfiles
from lab.page import figures, page, report

SETTINGS = {"env": "webshop", "method": "coevolve", "model": "tiny", "seed": 7, "out": None,
            "hard_threshold": 0.6, "rollouts": 2, "lambda_sft": 0.1, "cut_turns": -1}
WANT = "i need a red cotton curtain that is machine washable, and price lower than 40.00 dollars"


def evaluation(agent, i, reward, success, split="test", **more):
    return dict(function="evaluate", cache_key="r", name=agent, i=i, split=split, episodes=4, turns=4.25,
                reward=reward, success=success, hard_negative=0.5, turn_limit=0.0, seconds=10.0) | more


def exploration(agent, n, success, hard, reward, i=1):
    return dict(function="explore", cache_key="r", name=agent, i=i, episodes=n, success=success,
                hard_negative=hard, reward=reward, turns=4.0, turn_limit=0.0, seconds=1.0)


def trained(function="train_preferences", seconds=1.0, **numbers):
    return dict(function=function, cache_key="r", first_loss=0.69, loss=0.6, seconds=seconds, **numbers)


PHASES = {
    "experts.jsonl": dict(function="collect_experts", experts=4, seconds=1.0,
                          dropped={"reward": 2, "too long": 1}),
    "sft-target": trained("train_sft", 3600.4, name="target", steps=90, tokens=9000),
    "sft-failure": trained("train_sft", name="failure", steps=90),
    "eval-0-target-test.jsonl": evaluation("target", 0, 0.5, 0.25),
    "eval-0-failure-test.jsonl": evaluation("failure", 0, 0.45, 0.25),
    "iter1/target.jsonl": exploration("target", 300, 0.5, 0.3, 0.7),
    "iter1/failure.jsonl": exploration("failure", 24, 20 / 24, 4 / 24, 0.94),
    "iter1/pairs-failure.jsonl": dict(function="make_pairs", seconds=0.0,
                                      pairs={"failure>failure": 6}, dropped={}),
    "iter1/failure-agent": trained(name="failure", i=1, steps=3),
    "iter1/pairs-target.jsonl": dict(
        function="make_pairs", seconds=0.0, dropped={"equal failures": 4, "x y": 7},
        pairs={"expert>target": 12, "expert>failure": 30, "failure>failure": 5}),
    "iter1/target-agent": trained(name="target", i=1, steps=20),
    "eval-1-target-test.jsonl": evaluation("target", 1, 0.6, 0.5),
    "eval-1-failure-test.jsonl": evaluation("failure", 1, 0.4, 0.25),
}
REWARDS = {0.5: [1.0, 0.5, 0.5, 0.0], 0.45: [1.0, 0.8, 0.0, 0.0], 0.6: [1.0, 1.0, 0.4, 0.0],
           0.4: [1.0, 0.6, 0.0, 0.0]}


def trajectory(task, agent, reward, replies, iteration=1, rollout=0, ended="done"):
    page = f"Instruction: [SEP] {WANT} [SEP]"
    messages = [{"role": "user", "content": f"WebShop [SEP] {page} Search"}]
    for reply in replies:
        messages += [{"role": "assistant", "content": reply},
                     {"role": "user", "content": f"{page} after {reply}"}]
    return {"task": task, "agent": agent, "iteration": iteration, "rollout": rollout, "seed": 0,
            "messages": messages, "ids": [], "action_mask": [], "reward": reward,
            "turns": len(replies), "ended": ended}


def write_lines(path, objects):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))


def write_run(folder, phases, **settings):
    """A run's settings and phases, and the files of its evaluations."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(settings={**SETTINGS, **settings})))
    (folder / "phases.json").write_text(json.dumps(phases))
    for output, row in phases.items():
        if "split" in row and "name" in row:
            write_lines(folder / output, [
                trajectory(f"webshop-test-{n}", row["name"], reward, ["click[x]"], row["i"])
                for n, reward in enumerate(REWARDS.get(row["reward"], [row["reward"]]))])
    return folder


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", PHASES)


def table(run, title):
    """Returns the rows of the table whose title starts with `title`, or no rows."""
    for name, columns, rows in report.tables(run):
        if name.startswith(title):
            return [dict(zip([c.lstrip("<") for c in columns], map(str, row))) for row in rows]
    return []


def test_interval_matches_the_normal_approximation_of_a_large_sample():
    values = [0.0, 1.0] * 200  # standard error of the mean: 0.5 / sqrt(400) = 0.025
    low, high = report.bootstrap_interval(values)
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.006)
    assert high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.006)
    assert report.bootstrap_interval([0.5] * 9) == (0.5, 0.5)


def test_the_numbers_of_a_run_by_hand(run):
    low, high = report.bootstrap_interval(REWARDS[0.6])
    report.close(run)
    found = json.loads((run / "result.json").read_text())["evaluations"]
    assert [e["reward"] for e in found] == [0.5, 0.45, 0.6, 0.4]
    assert table(run, "Evaluation")[2] == {
        "phase": "eval-1-target-test.jsonl", "name": "target", "split": "test", "episodes": "4",
        "turns": "4.250", "reward": "0.600", "success": "50.0%", "hard negatives": "50.0%",
        "turn limit": "0.0%", "h:mm:ss": "0:00:10", "low": f"{low:.3f}", "high": f"{high:.3f}",
        "tasks": "4", "out of context": "0"}
    assert [row["hard negatives"] for row in table(run, "explore")] == ["30.0%", "16.7%"]
    failure, target = table(run, "make pairs")
    assert [target[kind] for kind in PHASES["iter1/pairs-target.jsonl"]["pairs"]] == ["12", "30", "5"]
    assert target["dropped"] == "4 equal failures, 7 x y" and failure["expert>target"] == "-"
    assert table(run, "train sft")[0]["phase"] == "sft-target"
    assert table(run, "All phases") == [{"phase": "13 phases", "h:mm:ss": "1:00:46", "steps": "203",
                                         "episodes": "340", "tokens": "9,000"}]


def test_phases_and_numbers_of_a_fork_may_have_any_names(run):
    own = {"iter1/judge.jsonl": dict(function="judge", agreement=0.5, refused=3, dropped=7),
           "iter1/notes.jsonl": dict(function="make_pairs", pairs=12),
           "eval-1-bias.jsonl": dict(function="evaluate", split="test", bias=0.25),
           "iter1/critic": dict(function="fit", steps="all", seen=None),
           "eval-1-x-test.jsonl": evaluation("$\\frac$\x00", 1, 0.6, 0.5)}
    phases = PHASES | {output: row | dict(seconds=1.0) for output, row in own.items()}
    write_run(run, phases)
    for output, row in own.items():
        if output.endswith(".jsonl") and "episodes" not in row:
            write_lines(run / output, [dict(messages=[dict(role="user", content="?")], verdict=1)])
    report.close(run)
    assert len(json.loads((run / "result.json").read_text())["evaluations"]) == 5
    assert table(run, "judge") == [{"phase": "iter1/judge.jsonl", "agreement": "0.500",
                                    "refused": "3", "dropped": "7", "h:mm:ss": "0:00:01"}]
    assert "iter1/judge.jsonl" in page.page(run)


def test_an_edited_output_is_marked_and_its_evaluation_is_recomputed(run):
    """Of the rewards 1, 0.5, 0.5 and 0 the first two are left: mean 0.75, half of them successes. A
    reverted edit is not marked."""
    name = "eval-0-target-test.jsonl"
    phases = PHASES | {name: PHASES[name] | dict(hash=file_hash(run / name))}
    (run / "phases.json").write_text(json.dumps(phases))
    assert table(run, "Evaluation")[0]["phase"] == name
    whole = (run / name).read_text()
    (run / name).write_text("".join(whole.splitlines(keepends=True)[:2]))
    row = table(run, "Evaluation")[0]
    assert (row["phase"], row["reward"], row["success"]) == (f"{name} (edited since)", "0.750", "50.0%")
    (run / name).write_text(whole)
    assert table(run, "Evaluation")[0]["phase"] == name


@pytest.mark.filterwarnings("error")
def test_an_evaluation_without_episodes_is_left_out(run):
    (run / "eval-1-target-test.jsonl").write_text("")
    report.close(run)
    found = json.loads((run / "result.json").read_text())["evaluations"]
    assert [e["output"] for e in found] == [
        "eval-0-target-test.jsonl", "eval-0-failure-test.jsonl", "eval-1-failure-test.jsonl"]


def test_a_scenario_is_solved_if_all_its_tasks_are(tmp_path):
    run = write_run(tmp_path, {"eval-1-target-test.jsonl": evaluation(
        "target", 1, 0.6, 0.5, prompt_tokens=12000)}, env="appworld")
    rewards = {"a_1": 1, "a_2": 1, "b_1": 1, "b_2": 0.9, "c_1": 0}
    write_lines(run / "eval-1-target-test.jsonl", [
        trajectory(f"appworld-test-{key}", "target", reward, ["x"], ended="context_limit")
        for key, reward in rewards.items()])
    [row] = table(run, "Evaluation")
    assert (row["scenarios"], row["sgc"], row["out of context"]) == ("3", "33.3%", "5")
    assert row["prompt tokens"] == "12,000"
    assert "sgc" not in table(write_run(tmp_path / "shop", PHASES), "Evaluation")[0]


def test_the_figure_draws_the_rewards_of_the_run(run):
    """The target has rewards 0.5 and 0.6, with intervals. Equal runs give equal bytes."""
    made, other = figures.run_figure(run), figures.run_figure(run)
    assert figures.address(made) == figures.address(other)
    reward, success = made.axes
    line = reward.get_lines()[0]
    assert [*map(tuple, line.get_xydata())] == [(0, 0.5), (1, 0.6)]
    assert line.get_label() == "target agent, test"
    band = reward.collections[0].get_paths()[0].vertices
    intervals = [x for rewards in (REWARDS[0.5], REWARDS[0.6])
                 for x in report.bootstrap_interval(rewards)]
    assert (band[:, 1].min(), band[:, 1].max()) == (min(intervals), max(intervals))
    assert [*success.get_lines()[1].get_ydata()] == [0.25, 0.25]


def test_a_missing_run_or_a_damaged_file_is_an_error_in_one_line(run, monkeypatch, capsys):
    path = run / "eval-1-target-test.jsonl"
    path.write_text(path.read_text()[:-9])
    for given, says in ((run.parent, "not a run"), (run, "eval-1-target-test.jsonl, line 4: ")):
        monkeypatch.setattr(sys, "argv", ["page", str(given)])
        with pytest.raises(SystemExit) as ended:
            runfiles.command("page", page.main)
        said = capsys.readouterr().err
        assert ended.value.code == 2 and said.startswith("page: ") and says in said
        assert said.count("\n") == 1
    with pytest.raises(ZeroDivisionError):  # a bug is no line
        runfiles.command("page", lambda argv: 1 / 0)


def test_an_ascii_console_raises_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    runfiles.command("page", lambda argv: print("агент"))


def test_control_characters_are_escaped():
    assert runfiles.visible("\x1b]0;mine\x07 \ud800\tb\r\n") == "<1B>]0;mine<07> <D800> b\n"
