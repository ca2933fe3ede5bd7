"""The closing table, result.json, the figure and the side-by-side view on a run made by hand."""

import json
import shutil
from dataclasses import replace

import pytest

from dpo import Trajectory
from harness import report
from harness.files import RunError, read_jsonl
from study.compare import compare
from study.show import show

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
     "dropped": {"tied": 4, "too_long": 0, "no_failure": 7}},
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
    """A finished run: task -1 has a hard negative above the target's failure, -2 a higher one
    where the target succeeded, -3 no failure of the failure agent, -4 a low failure."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"settings": SETTINGS, "versions": {}}))
    write_lines(folder / "metrics.jsonl", METRICS)
    tasks = [f"webshop-train-{i}" for i in (1, 2, 3, 4)]
    write_lines(folder / "experts.jsonl", [
        trajectory(task, "expert", 1.0, ["search[curtain]", "click[Buy Now]"], iteration=0)
        for task in tasks])
    for iteration, scale in ((1, 0.0), (10, 1.0), (9, 0.0)):  # 10 is the last one, not 9
        for agent, rewards in (("target", (0.25, 1.0, 0.5, 0.2)), ("failure", (0.75, 0.9, 1, 0.1))):
            write_lines(folder / f"iter{iteration}" / f"{agent}.jsonl", [
                trajectory(task, agent, reward * scale, [f"click[{agent}]"], iteration)
                for task, reward in zip(tasks, rewards)])
    write_lines(folder / "eval-10-target-test.jsonl", [
        trajectory("webshop-test-0", "target", 0.3, ["click[x]"] * 3, 10, ended="budget")])
    return folder


def test_interval_of_equal_values_is_that_value():
    assert report.bootstrap_interval([0.5] * 9) == (0.5, 0.5)


def test_interval_matches_the_normal_approximation_of_a_large_sample():
    values = [0.0, 1.0] * 200  # standard error of the mean: 0.5 / sqrt(400) = 0.025
    low, high = report.bootstrap_interval(values)
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.006)
    assert high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.006)


def test_interval_of_nothing_is_refused():
    with pytest.raises(RunError, match="no values"):
        report.bootstrap_interval([])


def episode(reward, steps=2, **more):
    return Trajectory(task="t", reward=reward, steps=steps, ended="done", **more)


def test_the_numbers_of_an_evaluation_by_hand():
    rows = [episode(1.0), episode(0.5, 4), episode(0.0, 6)]
    found = report.scores(rows, ["a", "b", "c"])
    assert list(found) == ["reward", "reward_low", "reward_high", "success", "steps"]
    assert (found["reward"], found["success"], found["steps"]) == (0.5, 1 / 3, 4)
    assert 0 <= found["reward_low"] < 0.5 < found["reward_high"] <= 1
    rows = [episode(1.0, cut_replies=2), replace(episode(0.0), ended="context")]
    found = report.scores(rows, ["a", "b", "c"])
    assert list(found.items())[-3:] == [("lost", 1), ("out_of_context", 1), ("with_cut_replies", 1)]


def test_nothing_explored_has_shares_of_zero():
    assert report.table2([], 0.6) == dict(success=0, negative=0, hard_negative=0, reward=0)


def test_result_has_the_events_in_order_and_no_times(run):
    found = report.result(run)
    assert list(found) == ["settings", "evaluations", "exploration", "pairs", "dropped"]
    assert [(e["agent"], e["iteration"]) for e in found["evaluations"]] == [
        ("target", 0), ("failure", 0), ("target", 1), ("failure", 1)]
    assert found["pairs"][0]["kept"]["expert>failure"] == 30
    assert found["dropped"][0]["tasks"] == ["webshop-train-1", "webshop-train-9"]
    text = json.dumps(found)
    assert "seconds" not in text and "resident" not in text and '"event"' not in text


def test_equal_runs_in_two_folders_and_at_two_speeds_give_equal_results(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    (other / "config.json").write_text(json.dumps({"settings": {**SETTINGS, "out": "elsewhere"}}))
    write_lines(other / "metrics.jsonl", [
        {**each, "seconds": 1.0} if each["event"] == "phase" else each for each in METRICS])
    assert json.dumps(report.result(run)) == json.dumps(report.result(other))


def row(text, *starts):
    """The cells of the one row that begins with `starts`."""
    rows = [line.split() for line in text.splitlines() if line.split()[:len(starts)] == [*starts]]
    assert len(rows) == 1, rows
    return rows[0][len(starts):]


def test_table_of_evaluations(run):
    assert row(report.table(run), "1", "target", "test") == [
        "200", "0.600", "[0.550,", "0.650]", "42.0%", "4.2"]


def test_table_of_exploration_weighs_both_agents_by_their_trajectories(run):
    text = report.table(run)
    assert row(text, "1", "target", "300") == ["50.0%", "20.0%", "30.0%", "0.700"]
    # Both: success (300 x 0.5 + 100 x 0.1) / 400 = 0.40; negative (60 + 80) / 400 = 0.35;
    # hard (90 + 10) / 400 = 0.25; reward (210 + 30) / 400 = 0.6.
    assert row(text, "1", "all") == ["400", "40.0%", "35.0%", "25.0%", "0.600"]


def test_table_of_pairs_counts_kinds_and_reasons(run):
    assert row(report.table(run), "1", "target", "12") == [
        "30", "5", "11", "tied", "4,", "no", "failure", "7"]


def test_table_of_phases_ends_with_a_total(run):
    text = report.table(run)
    assert row(text, "sft-target") == ["0:01:30", "9,000", "100", "-", "700"]
    assert row(text, "eval-1-target-test.jsonl") == ["0:58:30", "1,000", "0", "200", "650"]
    assert row(text, "total") == ["1:00:00", "10,000", "3", "200", "700"]


def test_table_fits_100_columns_even_with_many_reasons(run):
    reasons = {f"some_long_reason_{i}": i + 1 for i in range(12)}
    write_lines(run / "metrics.jsonl", [
        {**each, "dropped": reasons} if each["event"] == "pairs" else each for each in METRICS])
    text = report.table(run)
    assert "some long reason 11 12" in " ".join(text.split())
    assert max(map(len, text.replace(str(run), "runs/x").splitlines())) <= 100


def test_table_of_an_unfinished_run_leaves_out_what_is_not_there(run):
    write_lines(run / "metrics.jsonl", METRICS[:2])
    text = report.table(run)
    assert "Evaluation" in text and "Exploration" not in text and "Pairs" not in text


@pytest.mark.parametrize("number, changed", [
    (1, dict(reward="much")), (1, dict(agent="nobody")), (4, dict(trajectories=None)),
    (6, dict(kept=None)), (0, dict(seconds="long"))])
def test_a_damaged_event_is_one_line_that_names_the_file(run, tmp_path, number, changed):
    event = {**METRICS[number], **changed}
    write_lines(run / "metrics.jsonl", [*METRICS[:number], event, *METRICS[number + 1:]])
    said = []
    for read in (report.table, lambda run: report.figure(run, tmp_path / "png"),
                 lambda run: compare([run])):
        try:
            read(run)
        except RunError as error:
            said.append(str(error))
    assert said
    for line in said:
        assert line.startswith(f"{run / 'metrics.jsonl'}: damaged (")
        assert "\n" not in line and len(line) < 400


def test_a_damaged_trajectory_is_one_line_that_names_the_file(run):
    rows = read_jsonl(run / "iter10/target.jsonl")
    del rows[1]["reward"]
    write_lines(run / "iter10/target.jsonl", rows)
    with pytest.raises(RunError, match="iter10/target.jsonl: damaged .KeyError: 'reward'"):
        show(run)


def test_figure_is_a_png_and_equal_runs_give_equal_bytes(run, tmp_path):
    for name in ("a.png", "b.png"):
        report.figure(run, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_figure_of_sft_alone_has_no_exploration(run, tmp_path):
    write_lines(run / "metrics.jsonl", METRICS[:2])
    report.figure(run, tmp_path / "sft.png")
    assert (tmp_path / "sft.png").stat().st_size > 10_000


def test_figure_without_evaluations_is_refused(run, tmp_path):
    write_lines(run / "metrics.jsonl", METRICS[:1])
    with pytest.raises(RunError, match="no evaluation"):
        report.figure(run, tmp_path / "none.png")


def order(text):
    return [line for line in text.splitlines() if line.startswith("webshop-")]


def test_show_prefers_a_high_failure_above_a_lower_one_of_the_target(run):
    assert order(show(run)) == ["webshop-train-1", "webshop-train-2", "webshop-train-4"]
    assert order(show(run, count=1)) == ["webshop-train-1"]


def test_show_puts_the_agents_of_the_last_iteration_side_by_side(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = show(run, ["webshop-train-1"])
    heads = next(line for line in text.splitlines() if line.startswith("EXPERT"))
    assert [part.strip() for part in heads.split("|")] == [
        "EXPERT", "TARGET, iteration 10", "FAILURE, iteration 10"]
    for part in ("reward 1.000, 2 steps", "reward 0.250, 1 step,", "reward 0.750, 1 step,"):
        assert part in text
    replies = [line for line in text.splitlines() if line.startswith("search[curtain]")]
    assert "click[target]" in replies[0] and "click[failure]" in replies[0]
    assert max(map(len, text.splitlines())) <= 120


def test_show_prints_the_instruction_once(run):
    assert " ".join(show(run, ["webshop-train-1"]).split()).count(WANT) == 1


def test_show_names_what_a_terminal_would_obey(run):
    rows = read_jsonl(run / "iter10/target.jsonl")
    for row in rows:
        row["messages"][-1]["content"] = "\x1b]0;mine\x07 bought"
    write_lines(run / "iter10/target.jsonl", rows)
    text = show(run, ["webshop-train-1"])
    assert "<1B>]0;mine<07>" in text and not {"\x1b", "\x07"} & {*text}


def test_show_without_a_failure_agent_has_two_columns(run):
    for path in run.glob("iter*/failure.jsonl"):
        path.unlink()
    text = show(run, count=1)
    assert "FAILURE" not in text and "TARGET" in text
    assert order(text) == ["webshop-train-3"]  # the target's highest failure, 0.5


def test_show_finds_the_evaluation_of_a_test_task(run):
    text = show(run, ["webshop-test-0"])
    assert "reward 0.300, 3 steps, out of steps" in text and "EXPERT" not in text


def test_show_takes_the_failure_agents_best_failure_of_several_rollouts(run):
    rewards = (0.1, 1.0, 0.8)
    write_lines(run / "iter10" / "failure.jsonl", [
        trajectory("webshop-train-1", "failure", reward, ["click[x]"], 10, rollout)
        for rollout, reward in enumerate(rewards)])
    assert "reward 0.800" in show(run, ["webshop-train-1"])


def test_show_refuses_an_unknown_task_and_names_known_ones(run):
    with pytest.raises(RunError, match="webshop-train-99.*such as webshop-train-1"):
        show(run, ["webshop-train-99"])


def test_a_folder_that_is_not_a_run_is_refused(tmp_path):
    for read in (report.result, report.table, show):
        with pytest.raises(RunError, match="not a run"):
            read(tmp_path)


def test_a_truncated_line_is_refused_with_file_and_line(run):
    path = run / "metrics.jsonl"
    path.write_text(path.read_text()[:-9])
    with pytest.raises(RunError, match=rf"metrics.jsonl, line {len(METRICS)}: not a whole JSON"):
        report.result(run)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(RunError, match="nothing.jsonl: no such file"):
        read_jsonl(tmp_path / "nothing.jsonl")


def test_compare_over_seeds_by_hand(tmp_path):
    """Rewards 0.5 and 0.7: mean 0.6, standard deviation 0.1 * sqrt(2)."""
    for seed, reward in ((0, 0.5), (1, 0.7)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"settings": {**SETTINGS, "seed": seed}}))
        write_lines(folder / "metrics.jsonl", [
            {"event": "evaluation", "agent": "target", "iteration": 1, "split": "test", "tasks": 2,
             "reward": reward, "reward_low": 0, "reward_high": 1, "success": 0.5, "steps": 3}])
    text = compare([tmp_path / "0", tmp_path / "1"])
    assert row(text, "target", "test")[1:] == [
        "1", "2", "0.600", "±", "0.141", "0.500", "±", "0.000"]
    with pytest.raises(RunError, match="name the folders"):
        compare([])
    with pytest.raises(RunError, match="compare one of them"):
        compare([tmp_path / "0", tmp_path / "0"])


@pytest.mark.parametrize("changed, says", [
    (dict(env="intercodesql"), "differ in env"), (dict(model="other"), "differ in model"),
    (dict(beta=0.5), "differ in beta (0.5, None)"), (dict(method="sft", beta=0.5), None),
    (dict(threads=7), None)])
def test_compare_refuses_to_average_what_differs_in_more_than_the_seed(tmp_path, changed, says):
    for seed, more in ((0, {}), (1, changed)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(
            {"settings": {**SETTINGS, "seed": seed, **more}}))
        write_lines(folder / "metrics.jsonl", [evaluation("target", 1, "test", .5, .4, .6, .3)])
    runs = [tmp_path / "0", tmp_path / "1"]
    if says is None:
        assert "test" in compare(runs)
    else:
        with pytest.raises(RunError) as error:
            compare(runs)
        assert says in str(error.value)


def test_episodes_out_of_context_stand_beside_the_number_of_tasks(run):
    events = read_jsonl(run / "metrics.jsonl")
    events[1].update(out_of_context=3, lost=1, with_cut_replies=2)
    write_lines(run / "metrics.jsonl", events)
    assert "200 (1 lost, 3 out of context, 2 with cut replies)" in report.table(run)
