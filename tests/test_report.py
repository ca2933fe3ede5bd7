"""The numbers and the figure of handmade runs, and the functions that commands for runs share."""

import io
import json
import sys

import numpy as np
import pytest
from conftest import refusal, table

from common.files import file_hash, read_json
from lab import runfiles
from lab.page import figures, page, report

SETTINGS = {"env": "webshop", "method": "coevolve", "model": "tiny", "seed": 7, "out": None,
            "hard_threshold": 0.6, "rollouts": 2, "lambda_sft": 0.1, "cut_turns": -1}




def phases(text):
    return {output: json.loads(record) for output, record in table(text)}


PHASES = phases("""
    experts.jsonl -> {"function": "collect_experts", "experts": 4, "dropped": {"reward": 2}, "seconds": 1.0}
    sft-target -> {"function": "train_sft", "name": "target", "steps": 90, "tokens": 9000, "seconds": 3600.4}
    sft-failure -> {"function": "train_sft", "name": "failure", "steps": 90, "seconds": 1.0}
    iter1/target.jsonl -> {"function": "explore", "name": "target", "i": 1, "episodes": 300, "hard_negative": 0.3, "seconds": 1.0}
    iter1/failure.jsonl -> {"function": "explore", "name": "failure", "i": 1, "episodes": 24, "hard_negative": 0.1667, "seconds": 1.0}
    iter1/pairs-failure.jsonl -> {"function": "make_pairs", "pairs": {"failure>failure": 6}, "dropped": {}, "seconds": 0.0}
    iter1/failure-agent -> {"function": "train_preferences", "name": "failure", "steps": 3, "seconds": 1.0}
    iter1/pairs-target.jsonl -> {"function": "make_pairs", "pairs": {"expert>target": 12, "failure>failure": 5}, "dropped": {"equal failures": 4, "x y": 7}, "seconds": 0.0}
    iter1/target-agent -> {"function": "train_preferences", "name": "target", "steps": 20, "seconds": 1.0}""")
EVALUATION = dict(function="evaluate", split="test", episodes=4, turns=4.25, reward=0.0,
                  success=0.0, hard_negative=0.5, turn_limit=0.0, seconds=10.0)
REWARDS = {"eval-0-target-test.jsonl": [1.0, 0.5, 0.5, 0.0],
           "eval-0-failure-test.jsonl": [1.0, 0.8, 0.0, 0.0],
           "eval-1-target-test.jsonl": [1.0, 1.0, 0.4, 0.0],
           "eval-1-failure-test.jsonl": [1.0, 0.6, 0.0, 0.0]}
for output in REWARDS:
    _, i, name, _ = output.split("-")
    PHASES[output] = EVALUATION | dict(name=name, i=int(i))


def trajectory(task, agent, reward, iteration=1, rollout=0, replies=("click[x]",)):
    page = "Instruction: [SEP] i need a red curtain, and price lower than 40.00 dollars [SEP]"
    messages = [dict(role="user", content=f"WebShop [SEP] {page} Search")]
    for reply in replies:
        messages += [dict(role="assistant", content=reply),
                     dict(role="user", content=f"{page} after {reply}")]
    return dict(task=task, agent=agent, iteration=iteration, rollout=rollout, seed=0,
                messages=messages, ids=[5, 9, 11], action_mask=[0, 0, 1], reward=reward,
                turns=len(replies), ended="done")


def write_lines(path, objects):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))


def write_run(folder, phases, rewards={}, replies={}, **settings):
    """Writes a run: its settings and phases, and the trajectories of phases, one for each task.

    Args:
        folder: The run's folder.
        phases: The records of phases.json.
        rewards: The rewards of the tasks, for the name of each trajectory file.
        replies: The replies of each agent, if they are not only click[x].
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(settings=SETTINGS | settings)))
    (folder / "phases.json").write_text(json.dumps(phases))
    for output, of_tasks in rewards.items():
        record = phases[output]
        name, split = record.get("name", "expert"), record.get("split", "train")
        write_lines(folder / output, [
            trajectory(f"webshop-{split}-{n}", name, reward, record.get("i", 0),
                       replies=replies.get(name, ["click[x]"]))
            for n, reward in enumerate(of_tasks)])
    return folder


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", PHASES, REWARDS)


def texts(rows, columns, form=str):
    """Returns columns of rows, which are dicts, as one text per row."""
    found = []
    for row in rows:
        cells = [form(row[name]) for name in columns.split(", ")]
        found.append(" -> ".join(cells))
    return found


def shown(run, title, columns):
    """Returns columns of the page's table whose title starts with `title`."""
    for name, header, rows in report.tables(run):
        if name.startswith(title):
            header = [column.lstrip("<") for column in header]
            return texts([dict(zip(header, row)) for row in rows], columns)


def test_the_numbers_of_a_run_by_hand(run):
    report.close(run)
    found = read_json(run / "result.json")["evaluations"]
    assert [e["reward"] for e in found] == [0.5, 0.45, 0.6, 0.4]
    assert shown(run, "Evaluation", "name, split, episodes, turns, reward, success")[2] == (
        "target -> test -> 4 -> 4.250 -> 0.600 -> 50.0%")
    assert "sgc" not in str(report.tables(run))  # it has no scenarios
    columns = "hard negatives, turn limit, h:mm:ss, tasks, out of context"
    assert shown(run, "Evaluation", columns)[2] == "50.0% -> 0.0% -> 0:00:10 -> 4 -> 0"
    assert shown(run, "explore", "hard negatives") == ["30.0%", "16.7%"]
    assert shown(run, "make pairs", "expert>target, failure>failure, dropped") == [
        "- -> 6 -> -", "12 -> 5 -> 4 equal failures, 7 x y"]
    assert shown(run, "train sft", "phase") == ["sft-target", "sft-failure"]
    assert shown(run, "All phases", "phase, h:mm:ss, steps, episodes, tokens") == [
        "13 phases -> 1:00:46 -> 203 -> 340 -> 9,000"]


def test_phases_and_numbers_of_a_fork_may_have_any_names(run):
    own = phases(r"""
        iter1/judge.jsonl -> {"function": "judge", "agreement": 0.5, "refused": 3, "dropped": 7, "seconds": 1.0}
        iter1/notes.jsonl -> {"function": "make_pairs", "pairs": 12, "seconds": 1.0}
        eval-1-bias.jsonl -> {"function": "evaluate", "split": "test", "bias": 0.25, "seconds": 1.0}
        iter1/critic -> {"function": "fit", "steps": "all", "seen": null, "seconds": 1.0}""")
    named = "eval-1-x-test.jsonl"
    own[named] = PHASES["eval-1-target-test.jsonl"] | dict(name="$\\frac$\x00")
    write_run(run, PHASES | own, {named: [1.0]})
    for output in "iter1/judge.jsonl", "iter1/notes.jsonl", "eval-1-bias.jsonl":
        write_lines(run / output, [dict(messages=[dict(role="user", content="?")], verdict=1)])
    report.close(run)
    assert len(read_json(run / "result.json")["evaluations"]) == 5
    assert shown(run, "judge", "phase, agreement, refused, dropped, h:mm:ss") == [
        "iter1/judge.jsonl -> 0.500 -> 3 -> 7 -> 0:00:01"]
    assert "iter1/judge.jsonl" in page.page(run)


@pytest.mark.filterwarnings("error")
def test_an_edited_output_is_marked_and_its_evaluation_is_recomputed(run):
    """Of the rewards 1, 0.5, 0.5 and 0 the first two are left: mean 0.75, half of them successes. A
    reverted edit is not marked. An evaluation without episodes is left out."""
    name, *others = REWARDS
    path, whole = run / name, (run / name).read_text()
    write_run(run, PHASES | {name: PHASES[name] | dict(hash=file_hash(path))})
    columns = "phase, reward, success"
    path.write_text("".join(whole.splitlines(keepends=True)[:2]))
    assert shown(run, "Evaluation", columns)[0] == f"{name} (edited since) -> 0.750 -> 50.0%"
    path.write_text(whole)
    assert shown(run, "Evaluation", columns)[0] == f"{name} -> 0.500 -> 25.0%"
    path.write_text("")
    report.close(run)
    assert [e["output"] for e in read_json(run / "result.json")["evaluations"]] == others


def test_a_scenario_is_solved_if_all_its_tasks_are(tmp_path):
    output = "eval-1-target-test.jsonl"
    run = write_run(tmp_path, {output: PHASES[output] | dict(prompt_tokens=12000)}, env="appworld")
    rewards = {"a_1": 1, "a_2": 1, "b_1": 1, "b_2": 0.9, "c_1": 0}
    write_lines(run / output, [
        trajectory(f"appworld-test-{key}", "target", reward) | dict(ended="context_limit")
        for key, reward in rewards.items()])
    assert shown(run, "Evaluation", "scenarios, sgc, out of context, prompt tokens") == [
        "3 -> 33.3% -> 5 -> 12,000"]


def test_the_figure_draws_the_rewards_of_the_run(run):
    """The rewards of the target are 0.5 and 0.6, with intervals. Curves are shifted apart. The axis
    of rewards does not go below 0. Equal runs give equal bytes."""
    made, other = figures.run_figure(run), figures.run_figure(run)
    assert figures.address(made) == figures.address(other)
    reward, success = made.axes
    line, *_ = reward.get_lines()
    assert line.get_xydata().tolist() == [[0, 0.5], [1, 0.6]]
    assert line.get_label() == "target agent, test"
    low, high = report.bootstrap([[np.array(REWARDS["eval-1-target-test.jsonl"])]]).values()
    band = reward.collections[0].get_paths()[0].vertices.tolist()
    assert [1.0, low] in band and [1.0, high] in band
    assert success.get_lines()[1].get_xydata().tolist() == [[0.1, 0.25], [1.1, 0.25]]
    assert figures.shifted([(0, 0.5)], 6, 12) == [(0.3, 0.5)]
    assert reward.get_ylim()[0] == 0
    _, (of_margins,) = figures.figure(1)
    of_margins.plot((0, 1), (-0.5, 0))
    figures.label(of_margins, "margin")
    assert of_margins.get_ylim()[0] < 0


def test_a_missing_run_or_a_damaged_file_is_an_error_in_one_line(run, monkeypatch, capsys):
    path = run / "eval-1-target-test.jsonl"
    path.write_text(path.read_text()[:-9])
    for given, says in (run.parent, "not a run"), (run, "eval-1-target-test.jsonl, line 4: "):
        monkeypatch.setattr(sys, "argv", ["page", str(given)])
        assert refusal(runfiles.command, "page", page.main) == "2"
        line, = capsys.readouterr().err.splitlines()
        assert line.startswith("page: ") and says in line
    with pytest.raises(ZeroDivisionError):  # a bug is no line
        runfiles.command("page", lambda argv: 1 / 0)


def test_an_ascii_console_raises_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    runfiles.command("page", lambda argv: print("агент"))


def test_control_characters_are_escaped():
    assert runfiles.visible("\x1b]0;mine\x07 \ud800\tb\r\n") == "<1B>]0;mine<07> <D800> b\n"
