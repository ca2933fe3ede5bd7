"""The closing table, result.json, the figure and the comparison of runs made by hand."""

import json
from dataclasses import replace

import pytest

from lab.harness import report, scores
from lab.harness.files import RunError
from lab.look import figures
from lab.study import report as several
from lab.tokens import Trajectory

SETTINGS = {"env": "webshop", "method": "coevolve", "model": "tiny", "seed": 7, "out": None,
            "hard_threshold": 0.6}
WANT = "i need a red cotton curtain that is machine washable, and price lower than 40.00 dollars"


def evaluation(agent, iteration, split, reward, low, high, success):
    return {"event": "evaluation", "agent": agent, "iteration": iteration, "split": split,
            "tasks": 200, "reward": reward, "reward_low": low, "reward_high": high,
            "success": success, "steps": 4.25}


def exploration(agent, n, success, negative, hard, reward):
    return {"event": "exploration", "agent": agent, "iteration": 1, "trajectories": n,
            "success": success, "negative": negative, "hard_negative": hard, "reward": reward}


METRICS = [
    {"event": "phase", "phase": "sft-target", "seconds": 90.0, "tokens": 9000, "episodes": 0,
     "resident_mb": 700.0},
    evaluation("target", 0, "test", 0.5, 0.45, 0.55, 0.30),
    evaluation("failure", 0, "test", 0.49, 0.44, 0.54, 0.29),
    {"event": "dropped", "phase": "iter1/target.jsonl", "reason": "context", "count": 2,
     "tasks": ["webshop-train-1", "webshop-train-9"]},
    exploration("target", 300, 0.5, 0.2, 0.3, 0.7),
    exploration("failure", 100, 0.1, 0.8, 0.1, 0.3),
    {"event": "pairs", "iteration": 1, "trains": "target",
     "kept": {"expert>target": 12, "expert>failure": 30, "failure>failure": 5},
     "dropped": {"tied": 4, "no failure": 7}},
    {"event": "train", "phase": "iter1/target-agent", "step": 1, "loss": 0.69},
    {"event": "phase", "phase": "eval-1-target-test.jsonl", "seconds": 3510.4, "tokens": 1000,
     "episodes": 200, "resident_mb": 650.0},
    evaluation("target", 1, "test", 0.6, 0.55, 0.65, 0.42),
    evaluation("failure", 1, "test", 0.4, 0.35, 0.45, 0.12),
]


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


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(
        dict(settings=SETTINGS, versions={}, tasks=dict(split_by="by rule", overlap=0))))
    write_lines(folder / "metrics.jsonl", METRICS)
    return folder


def test_interval_matches_the_normal_approximation_of_a_large_sample():
    values = [0.0, 1.0] * 200  # standard error of the mean: 0.5 / sqrt(400) = 0.025
    low, high = scores.bootstrap_interval(values)
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.006)
    assert high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.006)
    assert scores.bootstrap_interval([0.5] * 9) == (0.5, 0.5)


def episode(reward, steps=2, **more):
    return Trajectory(task="t", reward=reward, steps=steps, ended="done", **more)


def test_the_numbers_of_an_evaluation_by_hand():
    rows = [episode(1.0), episode(0.5, 4), episode(0.0, 6)]
    found = scores.scores(rows, ["a", "b", "c"])
    assert list(found) == ["reward", "reward_low", "reward_high", "success", "steps"]
    assert (found["reward"], found["success"], found["steps"]) == (0.5, 1 / 3, 4)
    assert 0 <= found["reward_low"] < 0.5 < found["reward_high"] <= 1
    rows = [episode(1.0, cut_replies=2), replace(episode(0.0), ended="context")]
    found = scores.scores(rows, ["a", "b", "c"])
    assert list(found.items())[-3:] == [("lost", 1), ("out_of_context", 1), ("with_cut_replies", 1)]


def test_result_has_the_events_in_order_and_neither_times_nor_places(run):
    found = report.result(run)
    assert list(found) == ["settings", "evaluations", "exploration", "pairs", "dropped"]
    assert [(e["agent"], e["iteration"]) for e in found["evaluations"]] == [
        ("target", 0), ("failure", 0), ("target", 1), ("failure", 1)]
    assert found["pairs"][0]["kept"]["expert>failure"] == 30
    (run / "config.json").write_text(json.dumps({"settings": {**SETTINGS, "out": "elsewhere"}}))
    write_lines(run / "metrics.jsonl", [
        {**each, "seconds": 1.0} if each["event"] == "phase" else each for each in METRICS])
    assert json.dumps(report.result(run)) == json.dumps(found)


def row(text, *starts):
    """The cells of the one row that begins with `starts`."""
    rows = [line.split() for line in text.splitlines() if line.split()[:len(starts)] == [*starts]]
    assert len(rows) == 1, rows
    return rows[0][len(starts):]


def test_the_closing_table_by_hand(run):
    text = report.table(run)
    assert row(text, "1", "target", "test") == [
        "200", "0.600", "[0.550,", "0.650]", "42.0%", "4.2"]
    assert row(text, "1", "target", "300") == ["50.0%", "20.0%", "30.0%", "0.700"]
    # Both: success (300 x 0.5 + 100 x 0.1) / 400 = 0.40; negative (60 + 80) / 400 = 0.35;
    # hard (90 + 10) / 400 = 0.25; reward (210 + 30) / 400 = 0.6.
    assert row(text, "1", "all") == ["400", "40.0%", "35.0%", "25.0%", "0.600"]
    assert row(text, "1", "target", "12") == ["30", "5", "11", "tied", "4,", "no", "failure", "7"]
    assert row(text, "sft-target") == ["0:01:30", "9,000", "100", "-", "700"]
    assert row(text, "total") == ["1:00:00", "10,000", "3", "200", "700"]
    write_lines(run / "metrics.jsonl", [{**METRICS[1], "out_of_context": 3, "lost": 1}])
    text = report.table(run)
    assert "200 (1 lost, 3 out of context)" in text and "Exploration" not in text


def figure_of(run):
    return figures.run_figure(SETTINGS, report.events(run))


def test_the_figure_is_an_svg_and_a_png_and_equal_runs_give_equal_bytes(run, tmp_path):
    for name in ("a", "b"):
        figures.svg(figure_of(run), tmp_path / name)
    for end, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        assert (tmp_path / f"a{end}").read_bytes().startswith(start)
        assert (tmp_path / f"a{end}").read_bytes() == (tmp_path / f"b{end}").read_bytes()


def test_the_figure_draws_the_rewards_of_the_log(run):
    """Of the target: 0.5 and 0.6 with intervals; shares of its exploration; its pairs."""
    reward, success, exploration, pairs = figure_of(run).axes
    line = reward.get_lines()[0]
    assert [*map(tuple, line.get_xydata())] == [(0, 0.5), (1, 0.6)]
    assert line.get_label() == "target agent, test"
    band = reward.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (0.45, 0.65)
    assert [*success.get_lines()[1].get_ydata()] == [0.29, 0.12]
    heights = [bar.get_height() for bar in exploration.patches]  # by share: target, failure agent
    assert heights == pytest.approx([0.5, 0.1, 0.3, 0.1, 0.2, 0.8])
    assert [bar.get_height() for bar in pairs.patches] == [12, 30, 5, 11]


def test_a_folder_that_is_not_a_run_is_refused(tmp_path):
    for read in (report.result, report.table, lambda path: several.main([str(path)])):
        with pytest.raises(RunError, match="not a run"):
            read(tmp_path)


def test_a_line_or_a_file_that_is_not_whole_is_refused_by_name(run):
    path = run / "metrics.jsonl"
    path.write_text(path.read_text()[:-9])
    with pytest.raises(RunError, match=rf"metrics.jsonl, line {len(METRICS)}:"):
        report.result(run)
    path.unlink()
    with pytest.raises(RunError, match="metrics.jsonl: no such file"):
        report.result(run)


def test_what_a_terminal_would_obey_is_escaped():
    assert report.visible("\x1b]0;mine\x07 \ud800\tb\r\n") == "<1B>]0;mine<07> <D800> b\n"


def runs_of(tmp_path, *settings):
    """Finished runs of one evaluation, with rewards 0.5, 0.7, ..."""
    for n, more in enumerate(settings):
        (tmp_path / str(n)).mkdir()
        (tmp_path / str(n) / "config.json").write_text(json.dumps(
            {"settings": {**SETTINGS, "rollouts": 2, "lambda_sft": 0.1, **more}}))
        write_lines(tmp_path / str(n) / "metrics.jsonl", [
            evaluation("target", 1, "test", 0.5 + 0.2 * n, 0, 1, 0.5)])
        (tmp_path / str(n) / "result.json").write_text("{}")
    return [str(tmp_path / str(n)) for n in range(len(settings))]


def test_compare_over_seeds_by_hand(tmp_path, capsys):
    """Rewards 0.5 and 0.7: mean 0.6, half of the interval 12.7062 x 0.1."""
    runs = runs_of(tmp_path, dict(seed=0), dict(seed=1))
    several.main(runs)
    text = capsys.readouterr().out
    assert row(text, "target", "test", "co-evolution") == [
        "1", "2", "0.600", "±", "1.271", "0.500", "±", "0.000"]
    assert {path.name for path in (tmp_path / "report").iterdir()} >= {
        "report.txt", "report.json", "report.html", "curves.svg", "curves.png"}
    (tmp_path / "1/result.json").unlink()
    for again in ([runs[0], runs[0]], runs):  # one that is counted twice, or has not finished
        with pytest.raises(RunError, match="compare one of them|not finished"):
            several.main(again)


@pytest.mark.parametrize("changed, says", [
    (dict(env="intercodesql"), "differ in env"), (dict(beta=0.5), "differ in beta (0.5, 0.1)"), (dict(method="sft", beta=0.5), None),
    (dict(threads=7), None)])
def test_compare_refuses_to_average_what_differs_in_more_than_the_seed(tmp_path, changed, says):
    runs = runs_of(tmp_path, dict(seed=0, beta=0.1), {"seed": 1, "beta": 0.1, **changed})
    if says is None:
        return several.main(runs)
    with pytest.raises(RunError) as error:
        several.main(runs)
    assert says in str(error.value)
