"""The method as a specification: pairs by hand, roles, whole runs and their folders, mistakes."""

import json
import math
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from dataclasses import replace
from itertools import combinations, product

import pytest
from accelerate.state import AcceleratorState
from conftest import TOY, Toy, ended, fork, make_tokenizer, plain_log_probs
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import coevolve
import dpo
import envs
from coevolve import Agent, Settings
from common.files import read_json, read_jsonl, write_jsonl
from dpo import Pair, Trajectory

ET = "expert>target"
EF = "expert>failure"
FF = "failure>failure"

# --------------------------------------------------------------------------------- pairs by hand


def rollouts_of(agent, rewards):
    return [Trajectory(agent=agent, iteration=1, rollout=n, reward=reward)
            for n, reward in enumerate(rewards)]


def target(*rewards):
    return rollouts_of("target", rewards)


def failure(*rewards):
    return rollouts_of("failure", rewards)


def expert(reward=1.0):
    return Trajectory(agent="expert", reward=reward)


def side(named):
    """A side of a pair in short, such as t0:0.5 for the target's rollout 0 with reward 0.5."""
    return f"{named['agent'][0]}{named['rollout']}:{named['reward']}"


def brief(rows):
    """(kind, chosen, rejected, weight, sft_weight) of each row."""
    return [(row["kind"], side(row["chosen"]), side(row["rejected"]), row["weight"],
             row["sft_weight"]) for row in rows]


@pytest.mark.parametrize("expert_reward, own, others, rows", [
    # Three pairs; the two with the expert share a weight of 1, that of failures has no SFT term.
    (1.0, [0.5], [0.75], [(ET, "e0:1.0", "t0:0.5", .5, .5),
                          (EF, "e0:1.0", "f0:0.75", .5, .5),
                          (FF, "f0:0.75", "t0:0.5", 1.0, 0.0)]),
    # Equal failures make no pair of failures.
    (1.0, [0.5], [0.5], [(ET, "e0:1.0", "t0:0.5", .5, .5), (EF, "e0:1.0", "f0:0.5", .5, .5)]),
    # The target succeeds: a tie with the expert, and no failure for the other one to be against.
    (1.0, [1.0], [0.25], [(EF, "e0:1.0", "f0:0.25", 1.0, 1.0)]),
    (1.0, [1.0], [1.0], []),
    # ETO: nobody else plays.
    (1.0, [0.5], [], [(ET, "e0:1.0", "t0:0.5", 1.0, 1.0)]),
    # An expert at 0.75 is beaten by a success and by a better failure, which is not imitated. The
    # kind names the chosen.
    (0.75, [1.0], [0.8], [("target>expert", "t0:1.0", "e0:0.75", .5, .5),
                          ("failure>expert", "f0:0.8", "e0:0.75", .5, .0)]),
    # An expert is imitated, whatever it earned; the failure that beats it is not.
    (0.5, [0.75], [0.25], [("target>expert", "t0:0.75", "e0:0.5", .5, .0),
                           (EF, "e0:0.5", "f0:0.25", .5, .5),
                           (FF, "t0:0.75", "f0:0.25", 1.0, 0.0)]),
    # An expert's equal makes no pair with it, but is a failure like any other.
    (0.75, [0.75], [0.5], [(EF, "e0:0.75", "f0:0.5", 1.0, 1.0),
                           (FF, "t0:0.75", "f0:0.5", 1.0, 0.0)]),
    # A missing rollout of the target.
    (1.0, [], [0.25], [(EF, "e0:1.0", "f0:0.25", 1.0, 1.0)]),
    # Two rollouts each, one a success: three pairs with the expert weigh 1/3 each; failures are
    # paired across agents only.
    (1.0, [0.5, 0.25], [0.5, 1.0], [
        (ET, "e0:1.0", "t0:0.5", 1 / 3, 1 / 3), (ET, "e0:1.0", "t1:0.25", 1 / 3, 1 / 3),
        (EF, "e0:1.0", "f0:0.5", 1 / 3, 1 / 3), (FF, "f0:0.5", "t1:0.25", 1.0, 0.0)]),
    # Rewards that differ by rounding are equal: 0.1 + 0.2 is no better than 0.3.
    (0.1 + 0.2, [0.3], [], []),
    (1.0, [0.1 + 0.2], [0.3], [(ET, "e0:1.0", "t0:0.30000000000000004", .5, .5),
                               (EF, "e0:1.0", "f0:0.3", .5, .5)]),
])
def test_d_tgt_by_hand(expert_reward, own, others, rows):
    dropped = Counter()
    found = coevolve.d_tgt(expert(expert_reward), target(*own), failure(*others), Settings(),
                           dropped)
    assert brief(found) == rows
    # Every comparison makes a pair, or is counted.
    comparisons = len(own) + len(others) + len(own) * len(others)
    assert len(found) + dropped.total() == comparisons


def d_tgt(own, others, expert_reward=1.0, success=1.0, **changed):
    """The pairs of one rollout of each agent, under other settings than the defaults."""
    return brief(coevolve.d_tgt(expert(expert_reward), target(own), failure(others),
                                replace(Settings(), **changed), Counter(), success))


def test_settings_of_d_tgt():
    assert d_tgt(1.0, 0.5, 0.75, expert_beaten="drop") == [(EF, "e0:0.75", "f0:0.5", 1.0, 1.0)]
    assert [row[3] for row in d_tgt(0.5, 0.25, pair_weights="none")] == [1.0, 1.0, 1.0]
    assert [row[0] for row in d_tgt(0.5, 0.25, d_tgt_failures="none")] == [ET, EF]
    assert [row[0] for row in d_tgt(0.5, 0.25, d_tgt_failures="hard")] == [ET, EF]
    assert [row[0] for row in d_tgt(0.6, 0.25, d_tgt_failures="hard")] == [ET, EF, FF]
    # Where success begins at 0.5, one of the two is no failure.
    assert [row[0] for row in d_tgt(0.5, 0.25, success=0.5)] == [ET, EF]


@pytest.mark.parametrize("own, others, rows", [
    ([0.75], [0.5], ["f0:0.75>t0:0.5"]),
    ([0.5], [0.5], []),
    ([0.5], [1.0], []),  # a success is no failure
    ([1 - 1e-16], [0.5], []),
    ([0.5], [], []),
    # The pairs within an agent are there, too.
    ([0.75, 1.0], [0.5, 0.25], ["t0:0.5>t1:0.25", "f0:0.75>t0:0.5", "f0:0.75>t1:0.25"]),
])
def test_d_fail_by_hand(own, others, rows):
    dropped = Counter()
    found = brief(coevolve.d_fail(failure(*own), target(*others), Settings(), dropped))
    assert [f"{chosen}>{rejected}" for _, chosen, rejected, _, _ in found] == rows
    assert {(kind, weight, sft) for kind, _, _, weight, sft in found} <= {(FF, 1.0, 0.0)}
    assert len(found) + dropped.total() == math.comb(len(own) + len(others), 2)


def d_fail(success=1.0, **changed):
    """The sides of the pairs of two rollouts of the target and one of the failure agent."""
    rows = coevolve.d_fail(failure(0.75), target(0.5, 0.25), replace(Settings(), **changed),
                           Counter(), success)
    return [row[1:3] for row in brief(rows)]


def test_settings_of_d_fail():
    assert d_fail(d_fail="cross") == [("f0:0.75", "t0:0.5"), ("f0:0.75", "t1:0.25")]
    assert d_fail(d_fail="none") == []
    assert d_fail(success=0.75) == [("t0:0.5", "t1:0.25")]


# ---------------------------------------------------------------- from pairs to what is trained on


@pytest.fixture(scope="module")
def encoder():
    return dpo.Encoder(make_tokenizer("chatml"))


def played(encoder, agent, reward, replies, task="a", iteration=1, ended="done"):
    """A trajectory of so many replies, each of two tokens or more and its end of turn."""
    messages = [dict(role="user", content="find a mug")]
    for n in range(replies):
        messages.append(dict(role="assistant", content=f"click[{agent} {n}]"))
        messages.append(dict(role="user", content="Page 1"))
    ids, mask = encoder.encode(messages[:-1], 1)
    return Trajectory(task, agent, iteration, ids=ids, action_mask=mask, reward=reward,
                      steps=replies, ended=ended)


def replies_in(t):
    """The number of replies in ids, counted by spans of the mask."""
    starts = [k for k in range(1, len(t.ids)) if t.action_mask[k] and not t.action_mask[k - 1]]
    return len(starts)


def test_groups_have_each_trajectory_once_and_cut_what_is_rejected(encoder):
    s = Settings()
    e = played(encoder, "expert", 1.0, 2, iteration=0)
    t = played(encoder, "target", 0.5, 9)
    f = played(encoder, "failure", 0.7, 8)
    rows = [dict(task="a", **row) for row in coevolve.d_tgt(e, [t], [f], s, Counter())]
    [group] = coevolve.preference_groups(rows, [e], [t, f], s, encoder)
    # Of 9 and 8 replies the first 7 are rejected, the expert's 2 and 5 more; chosen, f is whole.
    assert [replies_in(x) for x in group.trajectories] == [2, 7, 7, 8]
    assert group.pairs == [Pair(ET, 0, 1, .5, .5), Pair(EF, 0, 2, .5, .5), Pair(FF, 3, 1, 1., 0.)]
    [group] = coevolve.preference_groups(rows, [e], [t, f], replace(s, cut_turns=-1), encoder)
    assert group.trajectories == [e, t, f]  # f is one, chosen or rejected


def test_the_expert_that_cuts_is_the_one_that_was_imitated(encoder):
    """Another agent's trajectory may be the expert; it is called as the agent is."""
    s = replace(Settings(), cut_turns=1)
    e = played(encoder, "target", 1.0, 3, iteration=4)
    t = played(encoder, "target", 0.5, 9, iteration=5)
    rows = [dict(task="a", **row) for row in coevolve.d_tgt(e, [t], [], s, Counter())]
    assert [row["kind"] for row in rows] == [ET]
    [group] = coevolve.preference_groups(rows, [e], [t, e], s, encoder)
    assert [replies_in(x) for x in group.trajectories] == [3, 4]


def test_names_that_mean_nothing_or_two_things_are_refused(encoder):
    e = played(encoder, "expert", 1.0, 1, iteration=0)
    t = played(encoder, "target", 0.5, 2)
    [row] = coevolve.d_tgt(e, [t], [], Settings(), Counter())
    row["task"] = "a"
    with pytest.raises(envs.Refused, match="two trajectories are called .*'target', 1, 0"):
        coevolve.preference_groups([row], [e], [t, replace(t, reward=0.25)], Settings(), encoder)
    row["rejected"]["rollout"] = 9  # by somebody's hand
    with pytest.raises(envs.Refused, match="'target', 1, 9.*mend the pairs file"):
        coevolve.preference_groups([row], [e], [t], Settings(), encoder)


def test_a_cut_keeps_whole_turns(encoder):
    whole = played(encoder, "target", 0.5, 3)
    for replies in (1, 2):
        part = coevolve.cut(whole, replies, encoder)
        assert part.ids == whole.ids[:len(part.ids)] and part.ids[-1] == encoder.end_of_turn
        assert (replies_in(part), part.steps, part.ended) == (replies, replies, "budget")
    assert coevolve.cut(whole, 3, encoder) == coevolve.cut(whole, 9, encoder) == whole


def test_ends_of_turns_and_of_the_episode_can_be_left_out(encoder):
    """What stays is the content of all replies, but of the one that ended the episode."""
    kept = {}
    for ended_by in "done", "budget":
        t = played(encoder, "target", 0.5, 3, ended=ended_by)
        mask = coevolve.without_ends(t, encoder).action_mask
        kept[ended_by] = encoder.decode([i for i, acts in zip(t.ids, mask) if acts])
        assert encoder.end_of_turn not in [i for i, acts in zip(t.ids, mask) if acts]
    assert kept == dict(done="click[target 0]click[target 1]",
                        budget="click[target 0]click[target 1]click[target 2]")
    only = replace(t, ids=[1, encoder.end_of_turn], action_mask=[0, 1], steps=1)
    assert coevolve.without_ends(only, encoder) == only  # else nothing would be left


def test_a_reply_that_was_cut_off_keeps_its_last_token(encoder):
    """Its end of turn was not written by the agent, and is no action token already."""
    ids = encoder.start([dict(role="user", content="u")])
    written = encoder.tokenise("click[x")
    t = Trajectory(ids=[*ids, *written, encoder.end_of_turn],
                   action_mask=[0] * len(ids) + [1] * len(written) + [0], steps=1, ended="budget")
    assert coevolve.without_ends(t, encoder).action_mask == t.action_mask


# ------------------------------------------------------------------------------------ whole runs


def toy(*argv):
    """What a fork does, which may put the toy in the place of every environment."""
    def work():
        envs.make = lambda *_, **__: Toy()
        coevolve.main([str(word) for word in (*TOY, *argv)])

    return work


def finish(out, *argv):
    """What such a run in the toy prints, in a process of its own."""
    said = out.parent / f"{out.name}.said"
    said.unlink(missing_ok=True)
    assert ended(fork(toy(*argv, "--out", out), said)) == 0, said.read_text()[-3000:]
    return said.read_text()


def made(said):
    """The outputs that a run has made, by what it has printed: lines that end with a time."""
    return {line.split()[0] for line in said.splitlines() if re.search(r" \d+:\d\d$", line)}


def contents(run):
    """Every file of a run by name, and what is recorded of its phases, but for their time."""
    found = {}
    for path in sorted(run.rglob("*")):
        if path.is_file() and path.name not in ("config.json", "phases.json"):
            found[str(path.relative_to(run))] = path.read_bytes()
    phases = read_json(run / "phases.json")
    return found, {name: row | dict(seconds=0) for name, row in phases.items()}


def squared_distance(a, b):
    weights, others = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    return sum(((weights[name] - others[name]) ** 2).sum().item() for name in weights)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small_model):
    """(the folder of a run in the toy, the flag of its model)."""
    out = tmp_path_factory.mktemp("toy") / "run"
    model = ("--model", small_model)
    assert "coevolve on webshop" in finish(out, *model)
    return out, model


def test_a_run_makes_the_pairs_of_its_trajectories(small_run):
    rewards = {}  # (task, agent) -> those of its trajectories
    names = {"experts": "expert", "iter1/target": "target", "iter1/failure": "failure"}
    for name, agent in names.items():
        for row in read_jsonl(small_run / f"{name}.jsonl"):
            assert row["agent"] == agent and len(row["ids"]) == len(row["action_mask"])
            assert row["steps"] == sum(m["role"] == "assistant" for m in row["messages"])
            assert len(row["log_probs"]) == (agent != "expert") * sum(row["action_mask"])
            rewards.setdefault((row["task"], agent), []).append(row["reward"])
    assert sum(len(found) for found in rewards.values()) == 6 * (1 + 2 + 2)

    # The pairs in the files are those of Eq. (6) and (8), counted here from rewards alone.
    expected = Counter()
    for task in {task for task, _ in rewards}:
        [e] = rewards[task, "expert"]
        own = rewards[task, "target"]
        others = rewards[task, "failure"]
        across = sum(a != b and a < 1 and b < 1 for a, b in product(own, others))
        every = sum(a != b and a < 1 and b < 1 for a, b in combinations(own + others, 2))
        expected["target", ET] += sum(t < e for t in own)
        expected["target", EF] += sum(t < e for t in others)
        expected["target", FF] += across
        expected["failure", FF] += every
    found = Counter()
    for trains in "target", "failure":
        for row in read_jsonl(small_run / f"iter1/pairs-{trains}.jsonl"):
            found[trains, row["kind"]] += 1
            assert row["chosen"]["reward"] > row["rejected"]["reward"]
    assert found == expected and all(expected.values()), expected

    phases = read_json(small_run / "phases.json")
    for trains in "target", "failure":
        counted = phases[f"iter1/pairs-{trains}.jsonl"]["pairs"]
        assert counted == {kind: n for (name, kind), n in expected.items() if name == trains}
    evaluated = read_jsonl(small_run / "eval-1-target-test.jsonl")
    mean = sum(row["reward"] for row in evaluated) / 2
    assert phases["eval-1-target-test.jsonl"]["reward"] == pytest.approx(mean)


def test_preference_training_begins_at_the_agent_after_sft_with_ln_2(small_run):
    [first, *_] = read_jsonl(small_run / "iter1/failure-agent/train.jsonl")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4) and [*first["kinds"]] == [FF]
    steps = read_jsonl(small_run / "iter1/target-agent/train.jsonl")
    pairs = read_jsonl(small_run / "iter1/pairs-target.jsonl")
    counts = [kind["count"] for step in steps for kind in step["kinds"].values()]
    assert sum(counts) == 2 * len(pairs)

    # What the log says of the experts in the first batch is what the agent after SFT says of them.
    experts = {row["task"]: row for row in read_jsonl(small_run / "experts.jsonl")}
    agent = dpo.read_model(small_run / "sft-target")
    tasks = [*dict.fromkeys(row["task"] for row in pairs)]
    rng = random.Random(coevolve.seed_of(0, "dpo", "target", 1))
    said = {ET: 0, EF: 0}
    counted, loss = 0, 0.0
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
                said[row["kind"]] += says
                loss -= 0.5 * row["sft_weight"] * says  # lambda_SFT of the tiny model
    for kind in ET, EF:
        row = steps[0]["kinds"][kind]
        assert row["chosen"] * row["count"] == pytest.approx(said[kind], abs=1e-3)
        assert row["margin"] == pytest.approx(0, abs=1e-4)
    assert steps[0]["loss"] == pytest.approx(loss / counted, abs=1e-4)


# Four agents, whose names say nothing or something wrong of their roles.
FOUR = [Agent("failure", "D_tgt"), Agent("b", "D_fail"), Agent("target", "own"),
        Agent("c", "D_tgt")]


def failures(pairs):
    return sum(a != b and a < 1 and b < 1 for a, b in pairs)


def test_an_agent_learns_what_its_role_says_whatever_it_is_called(toy_run, monkeypatch):
    monkeypatch.setitem(coevolve.AGENTS, "coevolve", FOUR)
    out = toy_run(Toy, "--temperature", 2, "--dpo-steps", 5, "--failure-epochs", 2,
                  "--dpo-epochs", 3, "--lambda-dpo", 0.5, "--lambda-sft", 0, "--pair-weights",
                  "none", "--rollouts", 2)
    rewards = {agent.name: {} for agent in FOUR}  # name -> task -> rewards
    for agent in FOUR:
        for row in read_jsonl(out / f"iter1/{agent.name}.jsonl"):
            rewards[agent.name].setdefault(row["task"], []).append(row["reward"])

    for agent in FOUR:
        expected = Counter()
        for task, own in rewards[agent.name].items():
            others = []
            for name in rewards:
                if name != agent.name:
                    others += rewards[name][task]
                if agent.role == "D_tgt" or name == agent.name and agent.role == "own":
                    expected[f"expert>{name}"] += sum(r < 1 for r in rewards[name][task])
            if agent.role == "D_tgt":
                expected[FF] += failures(product(own, others))
            if agent.role == "D_fail":
                expected[FF] += failures(combinations(own + others, 2))
        pairs = read_jsonl(out / f"iter1/pairs-{agent.name}.jsonl")
        assert Counter(row["kind"] for row in pairs) == +expected

        # --dpo-steps is for D_tgt, --failure-epochs for D_fail. Eq. (7) has no lambdas.
        steps = read_jsonl(out / f"iter1/{agent.name}-agent/train.jsonl")
        trained = sum(kind["count"] for step in steps for kind in step["kinds"].values())
        ln2 = dict(D_tgt=0.5, D_fail=1.0, own=1.0)[agent.role] * math.log(2)
        assert steps[0]["loss"] == pytest.approx(ln2, abs=1e-4)
        if agent.role == "D_tgt":
            assert len(steps) == 5
        else:
            assert trained == dict(D_fail=2, own=3)[agent.role] * len(pairs)


@pytest.mark.parametrize("method, agent, flags", [
    ("eto", "target", []), ("positive", "positive", ["--lambda-sft", 3]),
    ("eto", "target", ["--lambda-sft", 3, "--pair-weights", "instruction"]),
    ("positive", "target", ["--lambda-sft", 3])])
def test_eto_is_dpo_alone(toy_run, method, agent, flags):
    """Section 5.1: "a DPO-only baseline". The loss of a whole batch, by transformers' forward and
    by hand; pi_ref is 1, so that margins differ."""
    out = toy_run(Toy, "--method", method, "--temperature", 2, "--rollouts", 2, "--reference",
                  "none", "--dpo-batch", 100, "--cut-turns", -1, *flags)
    said = {}
    model = dpo.read_model(out / f"sft-{agent}")
    played = ["positive", "target"] if method == "positive" else ["target"]
    for file in ["experts.jsonl", *(f"iter1/{name}.jsonl" for name in played)]:
        for row in read_jsonl(out / file):
            said[row["task"], row["agent"], row["rollout"]] = plain_log_probs(
                model, row["ids"], row["action_mask"]).sum().item()
    pairs = read_jsonl(out / f"iter1/pairs-{agent}.jsonl")
    alone = agent == "positive" or not flags
    of_task = Counter(row["task"] for row in pairs if "expert" in row["kind"])
    total = 0.0
    for row in pairs:
        w, l = (said[row["task"], row[side]["agent"], row[side]["rollout"]]
                for side in ("chosen", "rejected"))
        is_expert = row["chosen"]["agent"] == "expert"
        weight = 1.0 if alone or row["kind"] == FF else 1 / of_task[row["task"]]
        total += weight * math.log1p(math.exp(-0.1 * (w - l)))
        if is_expert and not alone:
            total -= 3 * weight * w
    [first, *_] = read_jsonl(out / f"iter1/{agent}-agent/train.jsonl")
    assert len({row["kind"] for row in pairs}) == (1 if alone or method == "eto" else 3)
    assert first["loss"] == pytest.approx(total / len(pairs), rel=1e-4)


def test_iterations_train_on_what_they_should(toy_run):
    """Two iterations with a buffer: the second D_fail has pairs with the first one's failures; an
    agent goes on from its own last one, and the reference is the agent as the phase begins."""
    out = toy_run(Toy, "--iterations", 2, "--d-fail", "buffer", "--temperature", 2)
    iterations = {name: set() for name in ("failure", "target")}
    for name, seen in iterations.items():
        for row in read_jsonl(out / f"iter2/pairs-{name}.jsonl"):
            seen |= {row["chosen"]["iteration"], row["rejected"]["iteration"]}
    assert iterations == dict(failure={1, 2}, target={0, 2})  # the experts are of none
    for name in "target", "failure":
        for i in 1, 2:
            [first, *_] = read_jsonl(out / f"iter{i}/{name}-agent/train.jsonl")
            assert all(abs(kind["margin"]) < 1e-3 for kind in first["kinds"].values())
        last, one, sft = (out / agent for agent in (f"iter2/{name}-agent", f"iter1/{name}-agent",
                                                    f"sft-{name}"))
        assert 0 < squared_distance(last, one) < squared_distance(last, sft)


def test_earlier_trajectories_change_d_fail_by_the_buffer_alone(toy_run, monkeypatch):
    """Whatever a loop keeps of them."""
    out = toy_run(Toy, "--temperature", 2)
    seen = {}
    for buffer in "all", "buffer":
        run = Recorder(out, replace(Settings(), d_fail=buffer))
        coevolve.make_pairs(run, out / buffer, out / "experts.jsonl",
                            {name: out / f"iter1/{name}.jsonl" for name in ("target", "failure")},
                            [out / "earlier.jsonl"], "failure", "D_fail")
        seen[buffer] = {row["rejected"]["iteration"] for row in read_jsonl(out / buffer)}
    assert seen == {"all": {1}, "buffer": {0, 1}}


class Recorder:
    """What `make_pairs` asks of a run; in the folder is an earlier copy of the target's file."""

    def __init__(self, out, settings):
        rows = read_jsonl(out / "iter1/target.jsonl")
        lines = [json.dumps(row | dict(iteration=0)) + "\n" for row in rows]
        (out / "earlier.jsonl").write_text("".join(lines))
        self.settings, self.env, self.main, self.name = settings, Toy(), True, "pairs"


def test_reference_of_sft_is_the_agent_after_sft(toy_run):
    out = toy_run(Toy, "--iterations", 2, "--reference", "sft", "--method", "eto",
                  "--temperature", 2)
    margins = []
    for i in 1, 2:
        [first, *_] = read_jsonl(out / f"iter{i}/target-agent/train.jsonl")
        margins.append(abs(first["kinds"][ET]["margin"]))
    assert margins[0] < 1e-3 < margins[1]


def test_a_failure_agent_of_a_folder_that_never_learns(toy_run, small_model):
    """It is not trained by SFT, stays as it is, and has no log of what it never learned."""
    shutil.copy(small_model / "config.json", small_model / "train.jsonl")
    out = toy_run(Toy, "--failure-from", small_model, "--d-fail", "none")
    (small_model / "train.jsonl").unlink()
    assert squared_distance(out / "iter1/failure-agent", small_model) == 0
    assert read_jsonl(out / "iter1/pairs-failure.jsonl") == []
    assert not (out / "iter1/failure-agent/train.jsonl").exists()
    assert not (out / "sft-failure").exists()


def test_a_failure_agent_that_reads_other_ids_is_refused_before_a_phase(toy_run, tmp_path):
    with pytest.raises(SystemExit, match="tiny: its tokens are not those of --model"):
        toy_run(Toy, "--failure-from", coevolve.MODELS["tiny"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["experts.jsonl", "checkpoint", "sft-target"])
def test_a_folder_of_something_else_stays_as_it_is(name, toy_run, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / name).write_text("mine")
    with pytest.raises(SystemExit, match=f"--out {out}: {name} is in it, and no run; give another"):
        toy_run(Toy)
    assert [path.read_text() for path in out.iterdir()] == ["mine"]
    (out / name).unlink()
    assert (toy_run(Toy) / "iter1/target-agent").exists()


def test_a_file_is_no_folder_of_a_run(toy_run, tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(SystemExit, match="it is a file; give a folder"):
        toy_run(Toy)


def test_a_trajectory_that_somebody_added_to_is_refused_by_line(toy_run, tmp_path):
    out = toy_run(Toy)
    rows = read_jsonl(out / "iter1/target.jsonl")
    rows[2]["note"] = "odd"
    write_jsonl(out / "iter1/target.jsonl", rows)
    with pytest.raises(SystemExit, match=r"iter1/target.jsonl, line 3: .* no 'note'; take"):
        toy_run(Toy)


def test_more_tokens_than_the_model_has_positions_are_said(toy_run, capsys):
    toy_run(Toy, "--max-tokens", 4097)
    assert "has 4,096 positions: " in capsys.readouterr().out


def test_the_positive_agent_learns_as_eto_does_and_the_target_from_both(toy_run):
    out = toy_run(Toy, "--method", "positive", "--temperature", 2)
    kinds = {}
    for name in "target", "positive":
        kinds[name] = {row["kind"] for row in read_jsonl(out / f"iter1/pairs-{name}.jsonl")}
    assert kinds == {"positive": {"expert>positive"},
                     "target": {"expert>target", "expert>positive", FF}}


@pytest.mark.parametrize("flags, alike", [
    (["--sft-batch", 8], True), (["--sft-batch", 7], False),  # of eight experts
    (["--sft-batch", 8, "--method", "eto"], False)])
def test_agents_that_sft_makes_alike_are_said_to_be(flags, alike, toy_run, capsys):
    toy_run(Toy, *flags)
    said = capsys.readouterr().out
    assert said.count("target and failure are one model after SFT") == alike
    assert said.count("lower --sft-batch 8") == alike


# --------------------------------------------------------------------------------- what is printed


def test_a_log_is_for_a_person(whole):
    said = (whole[0].parent / f"{whole[0].name}.said").read_text()
    assert "\r" not in said and "it/s" not in said  # no bars where the output is no terminal
    lines = {line.split()[0]: line for line in said.splitlines() if line.strip()}
    row = read_json(whole[0] / "phases.json")["iter1/target.jsonl"]
    phases = said.split("coevolve on")[0]
    assert f"{row['episodes']} episodes, reward {row['reward']:.3f}, " in phases
    assert f"{row['success']:.0%} solved, {row['hard']:.0%} hard failures, " in phases
    assert re.search(r"\n\S+  +\d+ steps?, loss \d\.\d{3} -> \d\.\d{3}  \d:\d\d\n", phases)
    assert "made_by" not in said and row["recipe"] not in said
    # The closing table as it always was.
    assert f"reward {row['reward']:.3f}  success {row['success']:.3f}" in lines["iter1/target.jsonl"]


def test_what_a_tokenizer_cannot_write_is_said(toy_run, monkeypatch, capsys):
    monkeypatch.setattr(dpo.Encoder, "read_back", lambda self, text: text.replace("word", "w ord"))
    toy_run(Toy, "--method", "eto")
    said = capsys.readouterr().out
    assert "changes 16 replies of experts" in said and "'the word', becomes 'the w ord'" in said


# -------------------------------------------------------------------------------------- its folder


def test_a_finished_run_does_nothing_again(whole):
    times = {}
    for path in whole[0].rglob("*.*"):
        if path.name not in ("phases.json", "config.json"):
            times[path] = path.stat().st_mtime_ns
    said = finish(whole[0], *whole[1], "--slots", 2)  # slots are free to change
    assert not made(said) and "other code" not in said
    assert times == {path: path.stat().st_mtime_ns for path in times}


def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(whole, tmp_path):
    phases = read_json(whole[0] / "phases.json")
    seconds = sum(row["seconds"] for row in phases.values())
    out, rng = tmp_path / "run", random.Random(0)
    kills = 0
    for _ in range(4):
        process = fork(toy(*whole[1], "--out", out), tmp_path / "said")
        time.sleep(rng.uniform(0, seconds / 4))  # so that it is never done before the last
        os.kill(process, signal.SIGKILL)
        kills += ended(process) == -signal.SIGKILL
    finish(out, *whole[1])
    assert kills and contents(out) == contents(whole[0])


@pytest.fixture
def edited(whole, tmp_path):
    """edited(change, *flags) -> which phases are made anew once change(folder) was done to a copy
    of the run, and what is printed."""
    def work(change, *flags):
        out = tmp_path / "run"
        if not out.exists():
            shutil.copytree(whole[0], out)
        change(out)
        said = finish(out, *whole[1], *flags)
        return made(said), said

    return work


def test_an_edited_pairs_file_makes_what_follows_from_it_anew(whole, edited, tmp_path):
    def without_failures(out):
        rows = read_jsonl(out / "iter1/pairs-target.jsonl")
        lines = [json.dumps(row) + "\n" for row in rows if row["kind"] != FF]
        (out / "iter1/pairs-target.jsonl").write_text("".join(lines))

    follows = {"iter1/target-agent", "eval-1-target-test.jsonl"}
    again, said = edited(without_failures)
    assert again == follows and said.count("is made again") == 2
    kinds = set()
    for step in read_jsonl(tmp_path / "run/iter1/target-agent/train.jsonl"):
        kinds |= {*step["kinds"]}
    assert kinds == {ET, EF}
    # The edit undone, all is as it was.
    undone, _ = edited(lambda out: shutil.copy(whole[0] / "iter1/pairs-target.jsonl", out / "iter1"))
    assert undone == follows and contents(tmp_path / "run") == contents(whole[0])


def test_a_deleted_file_alone_is_made_again(whole, edited, tmp_path):
    names = {"iter1/target.jsonl", "eval-0-failure-test.jsonl"}
    assert edited(lambda out: [(out / name).unlink() for name in names])[0] == names
    # An agent that is gone comes back as it was, so that what followed from it stands.
    assert edited(lambda out: shutil.rmtree(out / "sft-target"))[0] == {"sft-target"}
    assert contents(tmp_path / "run") == contents(whole[0])


def test_other_experts_make_everything_anew(edited, whole):
    def fewer(out):
        rows = (out / "experts.jsonl").read_text().splitlines(keepends=True)
        (out / "experts.jsonl").write_text("".join(rows[:5]))

    assert edited(fewer)[0] == {*read_json(whole[0] / "phases.json")} - {"experts.jsonl"}


def test_another_base_is_trained_from_anew(toy_run, small_model, tmp_path, capsys):
    base = shutil.copytree(small_model, tmp_path / "base")
    (base / ".cache").mkdir()  # as the hub's client leaves one
    flags = ("--model", base, "--method", "eto")
    out = toy_run(Toy, *flags)
    first = load_file(out / "sft-target/model.safetensors")
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    toy_run(Toy, *flags)
    said = capsys.readouterr().out
    assert "sft-target is made again" in said and "experts.jsonl is made again" not in said
    moved = load_file(out / "sft-target/model.safetensors")["model.norm.weight"]
    assert (moved - first["model.norm.weight"] - 1).abs().max() < 1e-2


def test_another_chat_template_makes_everything_anew(toy_run, small_model, tmp_path, capsys):
    """The experts, too, since their ids are those of a template."""
    base = shutil.copytree(small_model, tmp_path / "base")
    flags = ("--model", base, "--method", "eto")
    out = toy_run(Toy, *flags)
    ids = read_jsonl(out / "experts.jsonl")[0]["ids"]
    template = base / "chat_template.jinja"
    template.write_text("<|im_start|>system\nPlay.<|im_end|>\n" + template.read_text())
    capsys.readouterr()
    toy_run(Toy, *flags)
    assert made(capsys.readouterr().out) == {*read_json(out / "phases.json")}
    assert len(read_jsonl(out / "experts.jsonl")[0]["ids"]) > len(ids)


def delete_config(out):
    (out / "config.json").unlink()


def test_settings_stand_with_the_phases(edited, whole):
    """A config.json that is gone lets nothing pass that other settings have made."""
    assert edited(delete_config)[0] == set()  # the same settings
    again, said = edited(delete_config, "--dpo-lr", 0.5)
    assert again == {"iter1/target-agent", "iter1/failure-agent", "eval-1-target-test.jsonl",
                     "eval-1-failure-test.jsonl"}
    assert "iter1/target-agent is made again: it was made with --dpo-lr 0.001" in said
    again, _ = edited(delete_config, "--dpo-lr", 0.5, "--temperature", 2)
    assert {"iter1/target.jsonl", "iter1/failure.jsonl"} <= again and "sft-target" not in again
    again, _ = edited(delete_config, "--dpo-lr", 0.5, "--temperature", 2, "--max-tokens", 250)
    assert {"experts.jsonl", "eval-0-target-test.jsonl"} <= again


def test_more_iterations_are_no_other_run(toy_run, capsys):
    out = toy_run(Toy, "--method", "eto")
    capsys.readouterr()
    toy_run(Toy, "--method", "eto", "--iterations", 2)
    names = {"target.jsonl", "pairs-target.jsonl", "target-agent"}
    assert made(capsys.readouterr().out) == {f"iter2/{name}" for name in names} | {
        "eval-2-target-test.jsonl"}
    assert read_json(out / "config.json")["settings"]["iterations"] == 2
    line = refused(*TOY, "--method", "eto", "--model", read_json(out / "config.json")[
        "settings"]["model"], "--out", out)
    assert "iterations (2 -> 1)" in line


def test_what_is_gone_or_not_asked_for_is_not_recorded(edited, whole, tmp_path):
    """A copied folder, of which the first files stay, does not tell the numbers of the others."""
    out = shutil.copytree(whole[0], tmp_path / "run")
    shutil.rmtree(out / "iter1")
    (out / "eval-1-target-test.jsonl").unlink()
    gone = {name for name in read_json(out / "phases.json") if not (out / name).exists()}
    phases = read_json(out / "phases.json")
    phases["eval-9-target-test.jsonl"] = phases["eval-0-target-test.jsonl"]  # of a longer run
    shutil.copy(out / "eval-0-target-test.jsonl", out / "eval-9-target-test.jsonl")
    (out / "phases.json").write_text(json.dumps(phases))
    again, _ = edited(lambda out: None)
    assert again == gone and len(gone) > 5
    assert {*read_json(out / "phases.json")} == {*read_json(whole[0] / "phases.json")}


def test_what_other_code_has_made_is_said_and_kept(edited, whole):
    def as_if_by_other_code(out):
        phases = read_json(out / "phases.json")
        for name in "iter1/target-agent", "iter1/failure-agent":
            phases[name]["code"] = "0" * 16
        (out / "phases.json").write_text(json.dumps(phases))

    again, said = edited(as_if_by_other_code)
    assert again == set() and said.count("other code") == 1
    assert "iter1/failure-agent, and perhaps more" in said and "delete" in said


def test_two_processes_in_a_folder_are_one_too_many(whole, tmp_path):
    out = shutil.copytree(whole[0], tmp_path / "run")
    ready, go = os.pipe(), os.pipe()

    def hold():
        held = coevolve.files.lock(out)
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        held.close()

    holder = fork(hold, tmp_path / "holder")
    os.read(ready[0], 1)
    process = fork(toy(*whole[1], "--out", out), tmp_path / "said")
    assert ended(process) == 1
    os.write(go[1], b"x")
    ended(holder)
    said = (tmp_path / "said").read_text()
    assert f"--out {out}: another process is running in this folder" in said
    assert not made(finish(out, *whole[1]))


def truncate(agent):
    weights = agent / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)


def spoil(agent):
    """Damages weights, but not their size."""
    weights = agent / "model.safetensors"
    weights.write_bytes(b"\xff" * weights.stat().st_size)


def test_a_truncated_agent_is_made_again_whoever_reads_it(edited, whole, tmp_path):
    for agent in "iter1/target-agent", "sft-failure":  # the first is read by its evaluation alone
        again, said = edited(lambda out: truncate(out / agent))
        assert again == {agent} and f"{agent} is made again: its weights are not whole" in said
    assert contents(tmp_path / "run") == contents(whole[0])


def test_a_damaged_agent_of_the_run_itself_has_its_own_remedy(whole, tmp_path):
    out = shutil.copytree(whole[0], tmp_path / "run")
    spoil(out / "sft-target")
    (out / "iter1/target.jsonl").unlink()
    process = fork(toy(*whole[1], "--out", out), tmp_path / "said")
    assert ended(process) == 1
    said = (tmp_path / "said").read_text()
    assert f"{out}/sft-target: this agent of the run is damaged; delete the folder" in said
    assert "hub" not in said.split("SystemExit: ")[-1]


@pytest.mark.parametrize("error", [
    OSError(28, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")])
def test_a_full_disk_is_one_line(error, small_model, tmp_path, monkeypatch):
    def full(*_):
        raise error

    monkeypatch.setattr(envs, "make", lambda *_, **__: Toy())
    monkeypatch.setattr(dpo, "save", full)
    line = refused(*TOY, "--model", small_model, "--method", "eto", "--out", tmp_path / "run")
    assert "No space left" in line and "make room on the disk of --out" in line


def test_a_disk_without_room_for_the_agents_is_refused_before_anything_is_made(
        small_model, tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "make", lambda *_, **__: Toy())
    size = (small_model / "model.safetensors").stat().st_size
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3.9 * size))
    line = refused(*TOY, "--model", small_model, "--out", tmp_path / "run")
    assert "GB more, of 4 agents" in line and "give a folder on another disk" in line
    assert not list((tmp_path / "run").glob("*.jsonl"))


# ---------------------------------------------------------------------------- a user's mistakes


def refused(*flags):
    """The line with which a run ends that starts with these flags."""
    with pytest.raises(SystemExit) as refusal:
        coevolve.main([str(flag) for flag in flags])
    AcceleratorState._reset_state(True)
    line = refusal.value.code
    assert line.startswith("coevolve.py: ") and "\n" not in line and 30 < len(line) < 700, line
    return line


@pytest.mark.parametrize("flags, says", [
    ("--betta 1", "unrecognized arguments: --betta 1; --help lists the settings"),
    ("--env mars", "unknown environment 'mars'; choose from: webshop"),
    ("--method dance", "--method: invalid choice: 'dance'"),
    ("--beta much", "--beta: invalid float value: 'much'"),
    ("--beta -1", "--beta -1.0: must be above 0"),
    ("--beta nan", "--beta nan: must be a finite"),
    ("--iterations 0", "--iterations 0: must be at least 1"),
    ("--sft-warmup 1", "below 1"),
    ("--temperature 1e-39", "--temperature 1e-39: must be 0, which is greedy, or at least 0.001"),
    ("--temperature -1", "--temperature -1.0: must be 0"),
    ("--method sft --beta 0.2", "--beta is not read by --method sft"),
    ("--method eto --d-fail cross", "--d-fail is not read by --method eto"),
    ("--rollouts 2 --temperature 0", "--temperature 0: all rollouts of a task"),
    ("--max-new-tokens 768", "--max-new-tokens 768: must be below --max-tokens 768"),
    ("--intercode-data /", "unrecognized arguments: --intercode-data"),  # of another environment
    ("--experts /nowhere", "--experts /nowhere: is not there; give a file"),
    ("--model /nowhere", "--model /nowhere: "),
    ("--model a/b/c/d", "--model a/b/c/d: "),
    ("--max-tokens 40 --method sft", "no expert is left: {'too long': 100}; lower"),
])
def test_a_flag_that_is_wrong_is_named_with_its_remedy(flags, says, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert says in refused("--out", tmp_path / "run", *flags.split())


def help_of(capsys, *argv):
    """name of a flag -> its help in one line; and all that is printed."""
    with pytest.raises(SystemExit) as done:
        coevolve.main([*argv, "--help"])
    assert not done.value.code
    said = capsys.readouterr().out
    flags = re.split(r"\n  (?=--)", said)
    return {text.split()[0]: " ".join(text.split()) for text in flags}, said


def test_help_is_an_interface(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    flags, said = help_of(capsys, "--env", "intercodesql", "--rollouts", "3")
    assert said.startswith("usage: python coevolve.py [--env ENV] [--method METHOD]")
    for method in coevolve.METHODS:  # each with a line
        assert re.search(rf"\n  {method} +\w", said)
    # Groups by the classes of settings, with their headings.
    assert "\nExploration and preference training (Sections 4.2 and 4.3):\n" in said
    assert "\nThe failure agent (Section 4.2):\n" in said
    # The choices; a default with its source; what a preset or the user put in its place.
    assert flags["--reference"].startswith("--reference {phase,sft,none} The reference pi_ref")
    assert flags["--beta"].endswith("in iteration 1: default 0.1 [App. B; ETO]")
    assert flags["--lambda-sft"].endswith(
        "2.0 (preset tiny; default 0.1 [Section 4.3; ETO: Section 5.1])")
    assert flags["--iterations"].endswith("5 (preset intercodesql; default 3 [App. B; 5 on "
                                          "InterCodeSQL])")
    assert flags["--rollouts"].endswith("3 (given; default 1 [Section 5.2.1])")
    assert flags["--out"].endswith("default: runs/ENV-METHOD-sSEED")
    assert max(map(len, said.splitlines())) <= 100


def test_help_lists_the_settings_that_the_method_reads(capsys):
    eto, _ = help_of(capsys, "--method", "eto")
    every, _ = help_of(capsys)
    assert "--d-fail" in every and "--beta" in eto and "--d-fail" not in eto
    assert " 0.0 (preset --method eto; default 0.1 [" in eto["--lambda-sft"]
    assert " none (preset --method eto; default instruction [" in eto["--pair-weights"]
    given, _ = help_of(capsys, "--method", "eto", "--lambda-sft", "0.5")
    assert " 0.5 (given; " in given["--lambda-sft"]
    # Each says something of itself, and where its default is from.
    for text in every.values():
        if text.startswith("--"):
            assert re.search(r" [A-Z][^:]{10,}.*: .*default", text), text


def test_a_folder_of_other_settings_or_of_something_else_is_refused(toy_run, tmp_path, small_model):
    out, other = toy_run(Toy, "--method", "eto"), [*TOY, "--model", small_model]
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    line = refused(*other, "--method", "eto", "--out", out, "--seed", 7)
    assert "seed (0 -> 7); give another, or these settings again" in line and "--out" in line
    assert "method (eto -> positive)" in refused(*other, "--method", "positive", "--out", out)
    assert before == {path: path.read_bytes() for path in before}
    model = shutil.copytree(small_model, tmp_path / "model")
    files = {*model.iterdir()}
    assert "is no run's; give another folder" in refused(*other, "--out", model)
    assert {*model.iterdir()} == files
    (tmp_path / "file").write_text("x")
    assert str(tmp_path / "file") in refused(*other, "--out", tmp_path / "file")


def pruned(folder):
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "layers.1." not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def widened(folder):
    config = read_json(folder / "config.json")
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
    full = rows[0] | dict(messages=[], ids=[], action_mask=[], ended="context", steps=0)
    (tmp_path / "e").write_text("".join(json.dumps(row) + "\n" for row in [full, *rows]))
    finish(out, *whole[1], "--method", "eto", "--experts", tmp_path / "e",
           "--expert-min-reward", 0.7)
    assert read_jsonl(out / "experts.jsonl") == rows[1:]
    assert read_json(out / "phases.json")["experts.jsonl"]["dropped"] == {
        "too long": 1, "reward": 1}


def test_the_best_of_an_agents_own_trajectories_are_experts(whole, tmp_path):
    """Of several of a task the first with the most reward; the others are counted."""
    played = []
    for name in ("target", "failure"):
        played += read_jsonl(whole[0] / f"iter1/{name}.jsonl")
    tasks = list(dict.fromkeys(row["task"] for row in played))
    (tmp_path / "e").write_text("".join(json.dumps(row) + "\n" for row in played))
    out = tmp_path / "run"
    finish(out, *whole[1], "--method", "eto", "--experts", tmp_path / "e",
           "--expert-min-reward", -1, "--train-tasks", 3)

    found = read_jsonl(out / "experts.jsonl")
    assert [row["task"] for row in found] == tasks[:3]  # as many tasks, however many entries
    dropped = 0
    for row in found:
        of_task = [t for t in played if t["task"] == row["task"]]
        best = max(of_task, key=lambda t: t["reward"])
        dropped += len(of_task) - 1
        assert (row["agent"], row["reward"]) == ("expert", best["reward"])
        assert row["messages"] == best["messages"] and row["steps"] == best["steps"]
    phase = read_json(out / "phases.json")["experts.jsonl"]
    assert phase["dropped"] == {"not the best of its task": dropped}
    for row in read_jsonl(out / "iter1/pairs-target.jsonl"):  # pairs are against these
        expert, = [e for e in found if e["task"] == row["task"]]
        assert row["chosen"]["reward"] == expert["reward"] > row["rejected"]["reward"]
