"""The closing table, result.json, the figure and the comparison of runs made by hand."""

import json

import pytest

from common.files import read_jsonl
from common.settings import Refused
from lab import runfiles
from lab.page import figures, page, report
from lab.study import compare

SETTINGS = {"env": "webshop", "method": "coevolve", "model": "tiny", "seed": 7, "out": None,
            "hard_threshold": 0.6, "rollouts": 2, "lambda_sft": 0.1, "cut_turns": -1}
WANT = "i need a red cotton curtain that is machine washable, and price lower than 40.00 dollars"


def evaluation(agent, i, reward, success, split="test", turns=4.25):
    return dict(work="evaluate", recipe="r", name=agent, i=i, split=split, episodes=4,
                reward=reward, success=success, hard=0.5, turns=turns, budget=0.0, seconds=10.0)


def exploration(agent, n, success, hard, reward, i=1):
    return dict(work="explore", recipe="r", name=agent, i=i, episodes=n, success=success,
                hard=hard, reward=reward, turns=4.0, budget=0.0, seconds=1.0)


def trained(work="train_preferences", seconds=1.0, **numbers):
    return dict(work=work, recipe="r", first_loss=0.69, loss=0.6, seconds=seconds, **numbers)


PHASES = {
    "experts.jsonl": dict(work="collect_experts", experts=4, seconds=1.0,
                          dropped={"reward": 2, "too long": 1}),
    "sft-target": trained("train_sft", 3600.4, name="target", steps=90, tokens=9000),
    "sft-failure": trained("train_sft", name="failure", steps=90),
    "eval-0-target-test.jsonl": evaluation("target", 0, 0.5, 0.25),
    "eval-0-failure-test.jsonl": evaluation("failure", 0, 0.45, 0.25),
    "iter1/target.jsonl": exploration("target", 300, 0.5, 0.3, 0.7),
    "iter1/failure.jsonl": exploration("failure", 100, 0.1, 0.1, 0.3),
    "iter1/pairs-failure.jsonl": dict(work="make_pairs", trains="failure", seconds=0.0,
                                      pairs={"failure>failure": 6}, dropped={}),
    "iter1/failure-agent": trained(name="failure", i=1, steps=3),
    "iter1/pairs-target.jsonl": dict(
        work="make_pairs", trains="target", seconds=0.0, dropped={"equal failures": 4, "x y": 7},
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
            "steps": len(replies), "ended": ended}


def write_lines(path, objects):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))


def write_run(folder, phases, **settings):
    """A run's settings and phases, and the files of its evaluations."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(settings={**SETTINGS, **settings})))
    (folder / "phases.json").write_text(json.dumps(phases))
    for output, row in phases.items():
        if row.get("work") == "evaluate":
            write_lines(folder / output, [
                trajectory(f"webshop-test-{n}", row["name"], reward, ["click[x]"], row["i"])
                for n, reward in enumerate(REWARDS.get(row["reward"], [row["reward"]]))])
    return folder


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", PHASES)


def test_interval_matches_the_normal_approximation_of_a_large_sample():
    values = [0.0, 1.0] * 200  # standard error of the mean: 0.5 / sqrt(400) = 0.025
    low, high = report.bootstrap_interval(values)
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.006)
    assert high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.006)
    assert report.bootstrap_interval([0.5] * 9) == (0.5, 0.5)


def row(text, *starts):
    """The cells of the one row that begins with `starts`."""
    rows = [line.split() for line in text.splitlines() if line.split()[:len(starts)] == [*starts]]
    assert len(rows) == 1, rows
    return rows[0][len(starts):]


def test_the_closing_table_by_hand(run):
    low, high = report.bootstrap_interval(REWARDS[0.6])
    text = report.close(run)
    assert [e["reward"] for e in json.loads((run / "result.json").read_text())["evaluations"]] == [
        0.5, 0.45, 0.6, 0.4]
    assert row(text, "1", "target", "test") == [
        "4", "0.600", f"[{low:.3f},", f"{high:.3f}]", "50.0%", "4.2", "-"]
    assert row(text, "1", "target", "300") == ["50.0%", "20.0%", "30.0%", "0.700"]
    assert row(text, "iteration", "trains") == [
        "expert>failure", "expert>target", "failure>failure", "dropped", "reasons"]
    assert row(text, "1", "target", "30") == ["12", "5", "11", "equal", "failures", "4,", "x",
                                              "y", "7"]
    assert row(text, "1", "failure", "0") == ["0", "6", "0"]
    assert row(text, "experts.jsonl", "3") == ["reward", "2,", "too", "long", "1"]
    assert row(text, "sft-target") == ["1:00:00", "90", "-", "9,000"]
    assert row(text, "total") == ["1:00:46", "203", "416", "9,000"]
    rows = read_jsonl(run / "eval-1-target-test.jsonl")
    write_lines(run / "eval-1-target-test.jsonl", [{**rows[0], "ended": "context"}, *rows[1:]])
    assert row(report.table(run), "1", "target", "test")[-1] == "1"


@pytest.mark.filterwarnings("error")
def test_an_evaluation_without_episodes_is_left_out(run):
    """Somebody has emptied its file, and nothing has a mean over nothing."""
    (run / "eval-1-target-test.jsonl").write_text("")
    report.close(run)
    found = json.loads((run / "result.json").read_text())["evaluations"]
    assert [e["output"] for e in found] == [
        "eval-0-target-test.jsonl", "eval-0-failure-test.jsonl", "eval-1-failure-test.jsonl"]
    assert "nan" not in report.table(run)


def test_scenarios_are_solved_where_all_their_tasks_are(tmp_path):
    row_of = {"eval-1-target-test.jsonl": evaluation("target", 1, 0.6, 0.5)}
    run = write_run(tmp_path, row_of, env="appworld")
    rewards = {"a_1": 1, "a_2": 1, "b_1": 1, "b_2": 0.9, "c_1": 0}
    write_lines(run / "eval-1-target-test.jsonl", [
        trajectory(f"appworld-test-{key}", "target", reward, ["x"]) for key, reward in rewards.items()])
    assert row(report.table(run).partition("(SGC)")[2], "1", "target", "test") == ["3", "33.3%"]
    assert "SGC" not in report.table(write_run(tmp_path / "other", row_of))  # the shop has none


def test_signals_and_tasks_of_the_second_system(tmp_path):
    run = write_run(tmp_path / "run", {
        "iter0/tasks.jsonl": dict(work="first_tasks", tasks=12, seconds=1.0),
        "iter1/target-agent": dict(work="train", episodes=40, steps=3, D=12, seconds=1.0),
        "iter1/signals.jsonl": dict(work="find_signals", boundary=3, rare=4, picked=6, seconds=1.0,
                                    picks={"picked rare": 4, "picked boundary": 2}),
        "iter1/explored.jsonl": dict(work="explore", episodes=36, seconds=1.0),
        "iter1/proposals.jsonl": dict(work="judge", proposals=20, added=5, seconds=1.0,
                                      refused={"known already": 3, "a held-out product": 1}),
        "iter1/tasks.jsonl": dict(work="join", D=15, tasks=5, left=2, seconds=1.0)})
    text = report.table(run)
    assert row(text, "1", "-") == ["3", "4", "6", "36", "20", "5", "2", "15"]
    assert row(text, "known", "already") == ["3"] and "Exploration;" not in text
    assert row(text, "total") == ["0:00:06", "3", "76", "-"]


def test_the_figure_draws_the_rewards_of_the_run(run):
    """Of the target: 0.5 and 0.6 with intervals. Equal runs give equal bytes."""
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


def test_what_is_solved_is_up_to_the_environment(tmp_path):
    """In one with success at 0.5: in the table, the figure, the page and the comparison."""
    run = write_run(tmp_path / "run", PHASES)
    write_lines(run / "iter1/target.jsonl", [
        trajectory(f"webshop-train-{n}", "target", reward, ["click[x]"])
        for n, reward in enumerate((0.7, 0.5, 0.4, 0.0))])
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | dict(success=0.5)))
    assert runfiles.success_of(run) == 0.5
    assert "a negative has a reward below 0.5, where success begins; none is hard" in report.table(run)
    _, success = figures.run_figure(run).axes
    assert success.get_ylabel() == "share of tasks with reward 0.5 or more"
    shown = page.conversations(run, 4.5)
    assert shown["success"] == 0.5
    # Explored tasks come first, those where the best reward is least, the hardest failure before.
    assert [task["id"] for task in shown["tasks"]][:4] == [
        f"webshop-train-{n}" for n in (3, 2, 1, 0)]
    for file in "iter1/failure.jsonl", "iter1/target.jsonl":
        (run / file).write_text((run / "iter1/target.jsonl").read_text())
    parts = {title: rows for title, _, rows in compare.paper_figures(
        {"coevolve": {7: run}}, [], ["test"], tmp_path)}
    table, = (rows for title, rows in parts.items() if title.startswith("Table 2"))
    assert [share["mean"] for share in table[0][2:]] == [0.5, 0.5, 0.0]  # of four two are solved


def test_what_is_no_run_or_no_whole_file_is_refused_by_name(run):
    with pytest.raises(Refused, match="not a run"):
        compare.main([str(run.parent)])
    path = run / "eval-1-target-test.jsonl"
    path.write_text(path.read_text()[:-9])
    with pytest.raises(Refused, match="eval-1-target-test.jsonl, line 4: .* no whole"):
        report.table(run)
    assert len(read_jsonl(path, growing=True)) == 3


def test_what_a_terminal_would_obey_is_escaped():
    assert runfiles.visible("\x1b]0;mine\x07 \ud800\tb\r\n") == "<1B>]0;mine<07> <D800> b\n"


def test_compare_over_seeds_by_hand(tmp_path, capsys):
    """Rewards 0.5 and 0.7: mean 0.6, half of the interval 12.7062 x 0.1; of the first run's four
    tasks one is solved, of the second's one none: mean 1/8, half of the interval 12.7062 / 8."""
    for n, changed in enumerate(({}, dict(slots=7), dict(beta=0.5), dict(seed=1))):
        folder = write_run(tmp_path / str(n), {"eval-1-target-test.jsonl": evaluation(
            "target", 1, 0.5 + 0.2 * n, 0.5)}, **{**dict(seed=n, beta=0.1, slots=1), **changed})
        (folder / "result.json").write_text("{}")
    runs = [str(tmp_path / str(n)) for n in range(4)]
    compare.main(runs[:2])
    text = capsys.readouterr().out
    assert row(text, "test", "co-evolution") == [
        "1", "0.600", "±", "1.271", "0.125", "±", "1.588"]
    assert {path.name for path in (tmp_path / "report").iterdir()} == {
        "report.txt", "report.json", "curves.svg"}
    (tmp_path / "0/result.json").unlink()
    for other, why in ((2, "differ in beta .0.5, 0.1."), (3, "both coevolve with seed 1; compare"),
                       (1, "compare one of them"), (0, "has not finished")):
        with pytest.raises(Refused, match=why):
            compare.main([runs[1], runs[other]])


def test_a_share_of_nothing_is_not_below_zero(tmp_path):
    """1 - 20/24 - 4/24 is -6e-17."""
    phases = PHASES | {"iter1/target.jsonl": exploration("target", 24, 20 / 24, 4 / 24, 0.94)}
    text = report.close(write_run(tmp_path / "run", phases))
    assert row(text, "1", "target", "24") == ["83.3%", "0.0%", "16.7%", "0.940"]
