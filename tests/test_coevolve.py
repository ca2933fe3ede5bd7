"""Pairs by hand; whole runs, repeated, edited, killed and continued; a user's mistakes."""

import json
import math
import os
import random
import shutil
import signal
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import TOY, Toy, ended, fork, plain_log_probs
from safetensors.torch import load_file, save_file

import coevolve
import dpo
import envs
from coevolve import Settings
from common.files import read_jsonl
from dpo import Pair, Trajectory


def trajectory(agent, reward, rollout=0, iteration=1):
    return Trajectory(agent=agent, iteration=iteration, rollout=rollout, reward=reward)


def expert(reward=1.0):
    return trajectory("expert", reward, iteration=0)


def target(*rewards):
    return [trajectory("target", r, i) for i, r in enumerate(rewards)]


def failure(*rewards):
    return [trajectory("failure", r, i) for i, r in enumerate(rewards)]


def brief(rows):
    """(kind, chosen, rejected, weight, sft_weight); a side is agent, rollout, reward in short."""
    side = lambda x: f"{x['agent'][0]}{x['rollout']}:{x['reward']}"
    return [(r["kind"], side(r["chosen"]), side(r["rejected"]), r["weight"], r["sft_weight"])
            for r in rows]


ET, EF, FF = "expert>target", "expert>failure", "failure>failure"


@pytest.mark.parametrize("expert_reward, own, other, rows", [
    # Three pairs; the two expert pairs share a weight of 1, the failure pair has no SFT term.
    (1.0, [0.5], [0.75], [(ET, "e0:1.0", "t0:0.5", .5, .5), (EF, "e0:1.0", "f0:0.75", .5, .5),
                          (FF, "f0:0.75", "t0:0.5", 1.0, 0.0)]),
    # Equal failures make no failure pair.
    (1.0, [0.5], [0.5], [(ET, "e0:1.0", "t0:0.5", .5, .5), (EF, "e0:1.0", "f0:0.5", .5, .5)]),
    # The target succeeds: a tie with the expert, and nothing for the failure to be compared with.
    (1.0, [1.0], [0.25], [(EF, "e0:1.0", "f0:0.25", 1.0, 1.0)]),
    (1.0, [1.0], [1.0], []),
    # ETO: no failure agent.
    (1.0, [0.5], [], [(ET, "e0:1.0", "t0:0.5", 1.0, 1.0)]),
    # An expert at 0.75 is beaten by a success and by a better failure: they are the chosen ones.
    (0.75, [1.0], [0.8], [(ET, "t0:1.0", "e0:0.75", .5, .5), (EF, "f0:0.8", "e0:0.75", .5, .5)]),
    # An expert's equal is no pair, but it is a failure like any other.
    (0.75, [0.75], [0.5], [(EF, "e0:0.75", "f0:0.5", 1.0, 1.0),
                           (FF, "t0:0.75", "f0:0.5", 1.0, 0.0)]),
    # A missing rollout of the target.
    (1.0, [], [0.25], [(EF, "e0:1.0", "f0:0.25", 1.0, 1.0)]),
    # Two rollouts each, one a success: three expert pairs of weight 1/3; failures are paired
    # across the agents only.
    (1.0, [0.5, 0.25], [0.5, 1.0], [
        (ET, "e0:1.0", "t0:0.5", 1 / 3, 1 / 3), (ET, "e0:1.0", "t1:0.25", 1 / 3, 1 / 3),
        (EF, "e0:1.0", "f0:0.5", 1 / 3, 1 / 3), (FF, "f0:0.5", "t1:0.25", 1.0, 0.0)]),
])
def test_d_tgt_by_hand(expert_reward, own, other, rows):
    dropped = Counter()
    found = coevolve.d_tgt(expert(expert_reward), target(*own), failure(*other), Settings(),
                           dropped)
    assert len(found) + dropped.total() == len(own) + len(other) + len(own) * len(other)
    assert brief(found) == rows
    weights = [r["weight"] for r in found if r["kind"] != FF]
    assert not weights or sum(weights) == pytest.approx(1.0)


def test_d_tgt_settings():
    pairs = lambda own, other, reward=1.0, **changed: brief(coevolve.d_tgt(
        expert(reward), target(own), failure(other), replace(Settings(), **changed), Counter()))
    assert pairs(1.0, 0.5, 0.75, expert_beaten="drop") == [(EF, "e0:0.75", "f0:0.5", 1.0, 1.0)]
    assert [r[3] for r in pairs(0.5, 0.25, pair_weights="none")] == [1.0, 1.0, 1.0]
    assert [r[0] for r in pairs(0.5, 0.25, d_tgt_failures="none")] == [ET, EF]
    assert [r[0] for r in pairs(0.5, 0.25, d_tgt_failures="hard")] == [ET, EF]
    assert [r[0] for r in pairs(0.6, 0.25, d_tgt_failures="hard")] == [ET, EF, FF]


@pytest.mark.parametrize("own, other, rows", [
    ([0.5], [0.75], ["f0:0.75>t0:0.5"]),
    ([0.5], [0.5], []),
    ([1.0], [0.5], []),                       # a success is no failure
    ([], [0.5], []),
    ([0.5, 0.25], [0.75, 1.0], ["t0:0.5>t1:0.25", "f0:0.75>t0:0.5", "f0:0.75>t1:0.25"]),
])
def test_d_fail_by_hand(own, other, rows):
    dropped = Counter()
    found = brief(coevolve.d_fail(target(*own), failure(*other), Settings(), dropped))
    assert [f"{w}>{l}" for _, w, l, _, _ in found] == rows
    assert all((kind, weight, sft) == (FF, 1.0, 0.0) for kind, _, _, weight, sft in found)
    assert len(found) + dropped.total() == math.comb(len(own) + len(other), 2)


def test_d_fail_settings_and_where_success_begins():
    own, other, s = target(0.5, 0.25), failure(0.75), Settings()
    d_fail = lambda s, success=1.0: [r[1:3] for r in brief(
        coevolve.d_fail(own, other, s, Counter(), success))]
    cross = d_fail(replace(s, d_fail="cross"))
    assert cross == [("f0:0.75", "t0:0.5"), ("f0:0.75", "t1:0.25")]
    assert d_fail(replace(s, d_fail="none")) == []
    assert d_fail(s, success=0.75) == [("t0:0.5", "t1:0.25")]
    d_tgt = coevolve.d_tgt(expert(), own, other, s, Counter(), success=0.75)
    assert [r["kind"] for r in d_tgt] == [ET, ET, EF]


def test_a_cut_keeps_whole_turns_and_ends_can_be_left_out():
    mask = [0, 0, 1, 1, 0, 1, 0, 0, 1, 1]
    whole = Trajectory("task", "target", ids=list(range(10)), action_mask=mask, reward=0.5,
                       steps=3, ended="done")
    first = lambda n: replace(whole, ids=whole.ids[:n], action_mask=mask[:n], ended="budget")
    cut = coevolve.shortened
    assert cut(whole, 1, True) == first(4) and cut(whole, 2, True) == first(6)
    assert cut(whole, 3, True) == cut(whole, 9, True) == whole
    # Without ends: each reply's last token, and all of the reply that ended the episode.
    assert cut(whole, 3, False).action_mask == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    budget = replace(whole, ended="budget")
    assert cut(budget, 3, False).action_mask == [0, 0, 1, 0, 0, 0, 0, 0, 1, 0]
    assert cut(whole, 1, False).action_mask == [0, 0, 1, 0]
    only = replace(whole, ids=[1, 2], action_mask=[0, 1], steps=1)
    assert cut(only, 1, False) == only  # else nothing would be left


def episode(agent, reward, turns, iteration=1, rollout=0, task="a"):
    return Trajectory(task, agent, iteration, rollout, ids=list(range(3 * turns)),
                      action_mask=[0, 1, 1] * turns, reward=reward, steps=turns, ended="done")


def test_groups_hold_each_trajectory_once_and_cut_what_is_rejected():
    e, t, f = episode("expert", 1.0, 2, 0), episode("target", 0.5, 9), episode("failure", 0.7, 8)
    s, episodes = Settings(), [e, t, f, episode("expert", 1.0, 1, 0, task="b"),
                               episode("target", 0.0, 3, task="b")]
    rows = [dict(task="a", **row) for row in coevolve.d_tgt(e, [t], [f], s, Counter())]
    rows += [dict(task="b", **row) for row in coevolve.d_tgt(*episodes[3:4], episodes[4:], [], s,
                                                             Counter())]
    a, b = coevolve.preference_groups(rows, episodes, s)
    # Of 9 and 8 turns the first 7 are rejected, the expert's 2 and 5 more; chosen, f is whole.
    assert [len(x.ids) / 3 for x in a.sequences] == [2, 7, 7, 8]
    assert a.pairs == [Pair(ET, 0, 1, .5, .5), Pair(EF, 0, 2, .5, .5), Pair(FF, 3, 1, 1.0, 0.0)]
    assert [len(x.ids) / 3 for x in b.sequences] == [1, 3] and b.pairs == [Pair(ET, 0, 1, 1.0, 1.0)]
    [a, _] = coevolve.preference_groups(rows, episodes, replace(s, cut_turns=-1))
    assert [len(x.ids) / 3 for x in a.sequences] == [2, 9, 8]  # f is one, chosen or rejected
    [a, _] = coevolve.preference_groups(rows, episodes, replace(s, rejected_ends="leave out"))
    assert [sum(x.action_mask) for x in a.sequences] == [4, 7, 7, 16]
    rows[0]["rejected"]["rollout"] = 9  # by somebody's hand
    with pytest.raises(coevolve.envs.Refused, match="'target', 1, 9.*mend the pairs file"):
        coevolve.preference_groups(rows, episodes, s)


# ------------------------------------------------------------------------------------ whole runs

def finish(out, *argv):
    """What such a run in the toy prints, in a process of its own."""
    said = out.parent / f"{out.name}.said"
    said.unlink(missing_ok=True)
    assert ended(fork(toy(*argv, "--out", out), said)) == 0, said.read_text()[-3000:]
    return said.read_text()


def toy(*argv):
    """What a fork does, which may put the toy in the place of every environment."""
    def work():
        envs.make = lambda *_, **__: Toy()
        coevolve.main([str(word) for word in (*TOY, *argv)])

    return work


def contents(run):
    """Every file of a run by name, without what tells the time or where it is."""
    files = {str(p.relative_to(run)): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}
    files.pop("config.json")
    phases = json.loads(files.pop("phases.json"))
    return files, {name: row | dict(seconds=0) for name, row in phases.items()}, [*phases]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small_model):
    """(the folder of a run in the toy, the flag of its model)."""
    out, model = tmp_path_factory.mktemp("toy") / "run", ("--model", small_model)
    assert "coevolve on webshop" in finish(out, *model)
    return out, model


def test_a_run_makes_the_pairs_of_its_trajectories(small_run):
    out, rows, names = small_run, {}, {"experts": "expert", "iter1/target": "target", "iter1/failure": "failure"}
    for name, agent in names.items():
        for row in read_jsonl(out / f"{name}.jsonl"):
            assert row["agent"] == agent and len(row["ids"]) == len(row["action_mask"])
            assert row["steps"] == sum(m["role"] == "assistant" for m in row["messages"])
            assert len(row["log_probs"]) == (agent != "expert") * sum(row["action_mask"])
            rows[row["task"], agent, row["rollout"]] = row["reward"]
    assert len(rows) == 6 * (1 + 2 + 2)
    # The pairs of the files are those of Eq. (6) and (8), counted here from the rewards alone.
    expected, found = Counter(), Counter()
    for task in {task for task, *_ in rows}:
        e, *own = rows[task, "expert", 0], rows[task, "target", 0], rows[task, "target", 1]
        other = rows[task, "failure", 0], rows[task, "failure", 1]
        expected["target", ET] += sum(e != t for t in own)
        expected["target", EF] += sum(e != f for f in other)
        failures = lambda *pairs: sum(a != b and a < 1 and b < 1 for a, b in pairs)
        across = [(t, f) for t in own for f in other]
        expected["target", FF] += failures(*across)
        expected["failure", FF] += failures(*across, own, other)
    for trains in ("target", "failure"):
        for row in read_jsonl(out / f"iter1/pairs-{trains}.jsonl"):
            found[trains, row["kind"]] += 1
            for side in "chosen", "rejected":
                named = row[side]["agent"], row[side]["rollout"]
                assert rows[(row["task"], *named)] == row[side]["reward"]
            assert row["chosen"]["reward"] > row["rejected"]["reward"]
    assert found == expected and len(expected) == 4 and all(expected.values()), expected
    phases = json.loads((out / "phases.json").read_text())
    for trains in ("target", "failure"):
        counted = phases[f"iter1/pairs-{trains}.jsonl"]["pairs"]
        assert counted == {kind: n for (name, kind), n in expected.items() if name == trains}
    played = read_jsonl(out / "eval-1-target-test.jsonl")
    assert phases["eval-1-target-test.jsonl"]["reward"] == pytest.approx(
        sum(row["reward"] for row in played) / 2)


def test_preference_training_begins_at_the_agent_after_sft_with_ln_2(small_run):
    out = small_run
    [first, *_] = read_jsonl(out / "iter1/failure-agent/train.jsonl")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4) and [*first["kinds"]] == [FF]
    steps = read_jsonl(out / "iter1/target-agent/train.jsonl")
    experts = {row["task"]: row for row in read_jsonl(out / "experts.jsonl")}
    pairs = read_jsonl(out / "iter1/pairs-target.jsonl")
    assert sum(k["count"] for step in steps for k in step["kinds"].values()) == 2 * len(pairs)
    # Of all the experts of the first batch, what the log says is what the agent after SFT says.
    wanted = {ET: 0, EF: 0}
    rng = random.Random(coevolve.seed_of(0, "dpo", "target", 1))
    tasks, agent = [*dict.fromkeys(row["task"] for row in pairs)], dpo.read_model(out / "sft-target")
    first, counted, loss = steps[0], 0, 0.0
    for task in rng.sample(tasks, len(tasks)):
        own = [row for row in pairs if row["task"] == task]
        if counted and counted + len(own) > 4:
            break
        counted += len(own)
        e = experts[task]
        says = plain_log_probs(agent, e["ids"], e["action_mask"]).sum().item()
        for row in own:
            loss += row["weight"] * math.log(2)
            if row["kind"] != FF:
                assert row["chosen"]["agent"] == "expert"
                wanted[row["kind"]] += says
                loss -= 0.5 * row["sft_weight"] * says  # lambda_SFT of the tiny model
    for kind in ET, EF:
        row = first["kinds"][kind]
        assert row["chosen"] * row["count"] == pytest.approx(wanted[kind], abs=1e-3)
        assert row["margin"] == pytest.approx(0, abs=1e-4)
    assert first["loss"] == pytest.approx(loss / counted, abs=1e-4)


# ------------------------------------------------------------------------------- runs in the toy


def test_a_finished_run_does_nothing_again(whole):
    times = {p: p.stat().st_mtime_ns for p in whole[0].rglob("*.*") if p.name != "phases.json"}
    finish(whole[0], *whole[1], "--slots", 2)  # slots are free to change
    assert times == {p: p.stat().st_mtime_ns for p in times}


def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(whole, tmp_path):
    seconds = sum(row["seconds"] for row in json.loads(
        (whole[0] / "phases.json").read_text()).values())
    out, rng, kills = tmp_path / "run", random.Random(0), 0
    for _ in range(4):
        process = fork(toy(*whole[1], "--out", out), tmp_path / "said")
        time.sleep(rng.uniform(0, seconds / 4))  # so that it is never done before the last
        os.kill(process, signal.SIGKILL)
        kills += ended(process) == -signal.SIGKILL
    finish(out, *whole[1])
    assert kills and contents(out) == contents(whole[0])


@pytest.fixture
def edited(whole, tmp_path):
    """edited(change) -> which phases are made anew once change(folder) was done to the run."""
    def made(change):
        out = tmp_path / "run"
        if not out.exists():
            shutil.copytree(whole[0], out)
        change(out)
        said = finish(out, *whole[1]).split("coevolve on")[0]
        return {line.split()[0] for line in said.splitlines() if "seconds" in line}, said

    return made


def test_an_edited_pairs_file_makes_what_follows_from_it_anew(whole, edited, tmp_path):
    def without_failures(out):
        rows = read_jsonl(out / "iter1/pairs-target.jsonl")
        (out / "iter1/pairs-target.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows if row["kind"] != FF))

    follows = {"iter1/target-agent", "eval-1-target-test.jsonl"}
    made, said = edited(without_failures)
    assert made == follows and said.count("is made again") == 2
    kinds = {k for step in read_jsonl(tmp_path / "run/iter1/target-agent/train.jsonl")
             for k in step["kinds"]}
    assert kinds == {ET, EF}
    # The edit undone, all is as it was.
    again = lambda out: shutil.copy(whole[0] / "iter1/pairs-target.jsonl", out / "iter1")
    assert edited(again)[0] == follows
    assert contents(tmp_path / "run")[:2] == contents(whole[0])[:2]


def test_a_deleted_file_alone_is_made_again(whole, edited, tmp_path):
    names = {"iter1/target.jsonl", "eval-0-failure-test.jsonl"}
    assert edited(lambda out: [(out / name).unlink() for name in names])[0] == names
    # An agent that is gone comes back as it was, so that what followed from it stands.
    assert edited(lambda out: shutil.rmtree(out / "sft-target"))[0] == {"sft-target"}
    assert contents(tmp_path / "run")[:2] == contents(whole[0])[:2]


def test_other_experts_make_everything_anew(edited, whole):
    def fewer(out):
        rows = (out / "experts.jsonl").read_text().splitlines(keepends=True)
        (out / "experts.jsonl").write_text("".join(rows[:5]))

    made, _ = edited(fewer)
    assert made == {*json.loads((whole[0] / "phases.json").read_text())} - {"experts.jsonl"}


def test_another_base_is_trained_from_anew(toy_run, small_model, tmp_path, capsys):
    base = shutil.copytree(small_model, tmp_path / "base")
    (base / ".cache").mkdir()  # as the hub's client leaves one
    out = toy_run(Toy, "--model", base, "--method", "eto")
    first = load_file(out / "sft-target/model.safetensors")
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    toy_run(Toy, "--model", base, "--method", "eto")
    said = capsys.readouterr().out
    assert "sft-target is made again" in said and "experts.jsonl is made again" not in said
    moved = load_file(out / "sft-target/model.safetensors")["model.norm.weight"]
    assert (moved - first["model.norm.weight"] - 1).abs().max() < 1e-2


def test_iterations_train_on_what_they_should(toy_run):
    """Two iterations with a buffer: the second D_fail has pairs with the first one's failures; an
    agent goes on from its own last one, and the reference is the agent as the phase begins."""
    out = toy_run(Toy, "--iterations", 2, "--d-fail", "buffer", "--temperature", 2)
    seen = {row[side]["iteration"] for row in read_jsonl(out / "iter2/pairs-failure.jsonl")
            for side in ("chosen", "rejected")}
    assert seen == {1, 2}
    for name in "target", "failure":
        for i in 1, 2:
            [first, *_] = read_jsonl(out / f"iter{i}/{name}-agent/train.jsonl")
            assert all(abs(k["margin"]) < 1e-3 for k in first["kinds"].values())
        last, one, sft = (load_file(out / agent / "model.safetensors") for agent in (
            f"iter2/{name}-agent", f"iter1/{name}-agent", f"sft-{name}"))
        squared = lambda a, b: sum(((a[k] - b[k]) ** 2).sum() for k in a)
        assert 0 < squared(last, one) < squared(last, sft)


def test_reference_of_sft_is_the_agent_after_sft(toy_run):
    out = toy_run(Toy, "--iterations", 2, "--reference", "sft", "--method", "eto",
                  "--temperature", 2)
    first, second = (read_jsonl(out / f"iter{i}/target-agent/train.jsonl")[0]["kinds"][ET]
                     for i in (1, 2))
    assert abs(first["margin"]) < 1e-3 < abs(second["margin"])


def test_a_failure_agent_from_a_folder_and_none_that_learns(toy_run, tmp_path, small_model):
    """A frozen agent stays the folder's, and says in its pairs that it has none."""
    out = toy_run(Toy, "--failure-from", small_model, "--d-fail", "none")
    frozen = load_file(out / "iter1/failure-agent/model.safetensors")
    assert all(torch.equal(frozen[k], v) for k, v in
               load_file(small_model / "model.safetensors").items())
    assert read_jsonl(out / "iter1/pairs-failure.jsonl") == []


def test_the_positive_agent_learns_as_eto_does_and_the_target_from_both(toy_run):
    out = toy_run(Toy, "--method", "positive", "--temperature", 2)
    kinds = {name: {row["kind"] for row in read_jsonl(out / f"iter1/pairs-{name}.jsonl")}
             for name in ("target", "positive")}
    assert kinds == {"positive": {"expert>positive"},
                     "target": {"expert>target", "expert>positive", FF}}


# ------------------------------------------------------------------------------ a user's mistakes


def refused(*flags):
    """The line with which a run ends that starts with these flags."""
    with pytest.raises(SystemExit) as refusal:
        coevolve.main([str(flag) for flag in flags])
    AcceleratorState._reset_state(True)
    line = refusal.value.code
    assert line.startswith("coevolve.py: ") and "\n" not in line and 30 < len(line) < 700, line
    return line


@pytest.mark.parametrize("flags, says", [
    ("--betta 1", "unrecognized arguments: --betta 1; --help lists every setting"),
    ("--env mars", "unknown environment 'mars'; choose from: webshop"),
    ("--method dance", "--method: invalid choice: 'dance'"),
    ("--beta much", "--beta: invalid float value: 'much'"),
    ("--beta -1", "--beta -1.0: must be above 0"), ("--beta nan", "--beta nan: must be a finite"),
    ("--iterations 0", "--iterations 0: must be at least 1"), ("--sft-warmup 1", "below 1"),
    ("--method sft --beta 0.2", "--beta is not read by --method sft"),
    ("--method eto --d-fail cross", "--d-fail is not read by --method eto"),
    ("--rollouts 2 --temperature 0", "--temperature 0: all rollouts of an instruction"),
    ("--max-new-tokens 768", "--max-new-tokens 768: must be below --max-tokens 768"),
    ("--intercode-data /", "unrecognized arguments: --intercode-data"),  # of another environment
    ("--experts /nowhere", "--experts /nowhere: is not there; give a file"),
    ("--model /nowhere", "--model /nowhere: "), ("--model a/b/c/d", "--model a/b/c/d: "),
    ("--max-tokens 40 --method sft", "no expert is left: {'too long': 100}; lower"),
])
def test_a_flag_that_is_wrong_is_named_with_its_remedy(flags, says, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert says in refused("--out", tmp_path / "run", *flags.split())


def test_help_lists_the_settings_that_the_method_reads(capsys):
    with pytest.raises(SystemExit) as done:
        coevolve.main(["--method", "eto", "--help"])
    assert not done.value.code
    said = capsys.readouterr().out
    assert "--beta 0.1: in iteration 1 [App. B; ETO]" in said and "--d-fail" not in said
    assert "--view short: " in said  # as it would be, here with the tiny model


def test_a_folder_of_other_settings_or_of_something_else_is_refused(toy_run, tmp_path, small_model):
    out, other = toy_run(Toy, "--method", "eto"), [*TOY, "--model", small_model]
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    line = refused(*other, "--method", "eto", "--out", out, "--seed", 7)
    assert "seed (0 -> 7); give another, or these settings again" in line and "--out" in line
    assert "method (eto -> positive)" in refused(*other, "--method", "positive", "--out", out)
    assert before == {p: p.read_bytes() for p in before}
    model = shutil.copytree(small_model, tmp_path / "model")
    assert "is no run's; give another folder" in refused(*other, "--out", model)
    assert load_file(model / "model.safetensors").keys()
    (tmp_path / "file").write_text("x")
    assert str(tmp_path / "file") in refused(*other, "--out", tmp_path / "file")


def pruned(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "layers.1." not in k},
              folder / "model.safetensors", {"format": "pt"})


def widened(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | dict(intermediate_size=64)))


@pytest.mark.parametrize("change, says", [
    (lambda f: (f / "model.safetensors").unlink(), "give a hub name within reach, or a folder with"),
    (pruned, "weights are missing, such as model.layers.1."),
    (widened, "; give a"),
    (lambda f: (f / "chat_template.jinja").unlink(), "it has no chat template; use a chat model"),
    (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
])
def test_a_model_that_cannot_be_used_is_named(change, says, small_model, tmp_path):
    folder = shutil.copytree(small_model, tmp_path / "model")
    change(folder)
    line = refused("--model", folder, "--out", tmp_path / "run", "--method", "sft")
    assert says in line and str(folder) in line, line
    assert not list((tmp_path / "run").glob("*"))


EXPERT = dict(task="webshop-train-17", reward=1.0, messages=[
    dict(role="user", content="u"), dict(role="assistant", content="a")])


@pytest.mark.parametrize("content, where", [
    ("[]", "no expert is left: {}"), ("# A title", "line 1"), ('{"a": 1}', "line 1"),
    ('{"a": 1', "line 1"), ("[null]", "entry 0"), (b"\xff", "ETO's JSON list"),
    (json.dumps(EXPERT | dict(task="webshop-train-99999")), "webshop-train-99999"),
    (json.dumps(EXPERT | dict(reward=70)), "reward 70"),
    (json.dumps(EXPERT | dict(messages=EXPERT["messages"][:1])), "line 1"),
    (json.dumps(EXPERT), "webshop-train-17 is another task here"),
])
def test_an_expert_file_that_is_none_is_named(content, where, tmp_path):
    (tmp_path / "e").write_bytes(content if isinstance(content, bytes) else content.encode())
    line = refused("--experts", tmp_path / "e", "--out", tmp_path / "run")
    assert where in line and (f"--experts {tmp_path / 'e'}" in line or content == "[]")
    assert not list((tmp_path / "run").glob("*.jsonl"))


def test_experts_of_a_run_are_experts_again(whole, tmp_path):
    """Kept as they were; those at or below the least reward are left out and counted."""
    rows, out = read_jsonl(whole[0] / "experts.jsonl"), tmp_path / "run"
    rows[0]["reward"], rows[1]["reward"] = 0.7, 0.71
    (tmp_path / "e").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finish(out, *whole[1], "--method", "eto", "--experts", tmp_path / "e",
           "--expert-min-reward", 0.7)
    assert read_jsonl(out / "experts.jsonl") == rows[1:]
    assert json.loads((out / "phases.json").read_text())["experts.jsonl"]["dropped"] == {"reward": 1}
