"""RFT, DART and PPO: by hand, and whole runs with a random model."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import Toy

import dpo
from common.files import read_jsonl
from dpo import Trajectory
from engine import run as engine_run
from engine.models import read_model
from environments import environment
from lab import baselines
from lab.settings import METHODS, Settings

TASKS = 8


class OneReply(Toy):
    """Pays (sum of the reply's letters modulo 5) / 4: a random reply succeeds one time in five."""
    max_turns = 1
    best = 4  # of (letters modulo 5); what agents write is capped here

    def reward(self):
        reply, = self.replies
        return 1.0 if reply == "c" else min(sum(map(ord, reply)) % 5, self.best) / 4

    def expert(self):
        return lambda observation: "c"


@pytest.fixture
def run(small_model, tmp_path, monkeypatch):
    """run(method, **settings) -> the finished run."""
    def start(method, out="run", **changed):
        monkeypatch.setattr(engine_run, "make", lambda *_, **__: OneReply())
        r = engine_run.Run(Settings(**dict(
            method=method, model=str(small_model), out=str(tmp_path / out), iterations=1,
            max_tokens=400, max_new_tokens=5, sft_epochs=1, sft_lr=1e-4,
            temperature=1.5) | changed), environment("webshop")())
        METHODS[method].loop(r)
        return r

    return start


def rows(run, name):
    return read_jsonl(run.folder / name)


def apart(run, *agents):
    """The largest difference between the weights of two agents of a run."""
    a, b = (read_model(run.folder / agent).state_dict() for agent in agents)
    return max((a[name] - b[name]).abs().max().item() for name in a)


# -------------------------------------------------------------------------------- RFT and DART


def played(task, reward, *replies, agent="target", opening=("a page",)):
    turns = [dict(role="user", content=text) for text in opening]
    for text in replies:
        turns += [dict(role="assistant", content=text), dict(role="user", content="next")]
    return Trajectory(task, agent, reward=reward, turns=len(replies), messages=turns[:-1],
                      action_mask=[1])


def test_join_by_hand():
    """A success joins with the expert's opening, without the shown example. It joins once, whatever
    thoughts precede its actions."""
    experts = [played("a", 1.0, "x", "y", agent="expert"), played("b", 1.0, "x", agent="expert")]
    shown = played("a", 1.0, "z", opening=("rules", "an example's task", "Observation: a page"))
    shown.messages[1]["role"] = "assistant"
    new, full = played("a", 1.0, "x"), played("a", 1.0, "y")
    full.ended = "context_limit"
    found, numbers = baselines.join_successes(SimpleNamespace(env=OneReply()), experts, [
        played("a", 0.9, "w"), played("a", 1.0, "x", "Thought: I know it.\nAction: y"), new,
        played("a", 1.0, "Thought: why not?\nAction:  x"), shown], [full, played("b", 1.0, "x")])
    assert found[:3] == [*experts, new]
    assert [[m["content"] for m in t.messages] for t in found[3:]] == [["a page", "z"]]
    assert len(shown.messages) == 4
    assert numbers == dict(experts=2, successes=2, dropped={
        "failure": 1, "known already": 3, "too long": 1})


def successes(episodes):
    """The tasks and replies of what succeeded otherwise than the experts do."""
    won = {(e["task"], e["messages"][1]["content"]) for e in episodes if e["reward"] == 1}
    return won - {(f"toy-train-{i}", "c") for i in range(TASKS)}


def test_rft_adds_each_success_once(run):
    r = run("rft", rollouts=6)
    sampled = rows(r, "iter1/target.jsonl")
    assert Counter(e["task"] for e in sampled) == {f"toy-train-{i}": 6 for i in range(TASKS)}
    new, joined = successes(sampled), rows(r, "iter1/experts.jsonl")
    assert new and len(joined) == TASKS + len(new)
    assert successes(joined) == new
    assert r.done["iter1/experts.jsonl"]["successes"] == len(new)
    assert [row["i"] for row in r.done.values() if row["function"] == "evaluate"] == [0, 1]


def test_rft_starts_from_the_base_again(run, monkeypatch):
    """If no sample succeeds, the second SFT equals the first one. There is one batch, so the order
    does not matter."""
    monkeypatch.setattr(OneReply, "best", 3)
    assert apart(run("rft"), "sft-target", "iter1/target-agent") < 1e-7


@pytest.mark.parametrize("successes, extra", [(0, 10), (1, 8), (4, 2), (5, 0)])
def test_dart_gives_what_the_paper_gives(successes, extra):
    assert baselines.dart_rollouts([True] * successes + [False] * (5 - successes), 10) == extra


def test_dart_samples_more_where_the_first_samples_failed(run):
    r = run("dart", rollouts=4, dart_budget=8)
    first, more = (rows(r, f"iter1/{name}.jsonl") for name in ("target", "target-more"))
    failures, extra = Counter(), Counter(e["task"] for e in more)
    for e in first:
        failures[e["task"]] += e["reward"] < 1
    assert len(set(failures.values())) > 1  # or the test would say little
    assert all(extra[task] == 2 * n for task, n in failures.items())
    assert min(e["rollout"] for e in more) == 4
    assert len({(e["task"], e["seed"]) for e in first + more}) == len(first + more)
    joined = rows(r, "iter1/experts.jsonl")[TASKS:]
    assert successes(joined) == successes(first + more)
    assert any(e["rollout"] >= 4 for e in joined)  # of the second sampling


# ----------------------------------------------------------------------------------------- PPO


def test_advantages_by_hand():
    assert baselines.leave_one_out([0.9, 0.6, 0.0]) == pytest.approx(
        [0.9 - 0.3, 0.6 - 0.45, 0.0 - 0.75])
    assert baselines.leave_one_out([0.5] * 4) == [0.0] * 4
    one, other = Trajectory(reward=0.5), Trajectory(reward=1.0)
    groups, unused = baselines.make_groups([[one], [], [one, other]])
    assert [group.advantages for group in groups] == [[-0.5, 0.5]]
    assert unused == ["the only rollout of its task"]


def said(token, reward=0.0):
    """An episode that reads token 0 and then writes the token given."""
    return Trajectory(ids=[0, token], action_mask=[0, 1], reward=reward)


def test_the_loss_by_hand():
    """Three tokens have advantage 1, one has -2. Ratios are clipped to 0.8 to 1.2.

    pi   old      A = 1                         A = -2                  d log pi
    .5   .5       min(1, 1) = 1                                         1
    .25  .2       min(1.25, 1.2) = 1.2                                  0
    .25  .4       min(0.625, 0.8) = 0.625                               0.625
    .25  .2                                     min(-2.5, -2.4) = -2.5  -2.5
    The SFT policy gives the last token probability 1/2, twice that of the policy: 0.1 log 2 more.
    """
    def logs(*chances):
        return torch.tensor(chances, dtype=torch.float64).log()

    group = baselines.TaskGroup(
        [said(0), said(1), said(2), said(1)], advantages=[1.0, 1.0, 1.0, -2.0],
        old_log_probs=logs(.5, .2, .4, .2), ref_log_probs=logs(.5, .25, .25, .5))
    policy = logs(.5, .25, .25, .25).requires_grad_()
    terms, _ = baselines.ppo_loss(policy, [group], clip=0.2, kl=0.1)
    terms["loss"].backward()
    assert terms["loss"].item() == pytest.approx(-(1 + 1.2 + 0.625 - 2.5) + 0.1 * math.log(2) ** 2 / 2)
    assert policy.grad.tolist() == pytest.approx([-1, 0, -0.625, 2.5 - 0.1 * math.log(2)])


def test_ppo_starts_at_the_sft_policy_and_moves(run, monkeypatch):
    """The old log-probabilities equal the sampler's, apart from rounding."""
    seen, loss = [], baselines.ppo_loss
    monkeypatch.setattr(baselines, "ppo_loss", lambda policy, groups, **how: seen.append(
        (policy.detach(), groups, how)) or loss(policy, groups, **how))
    for name, value in dict(EPOCHS=3, BATCH=2, CLIP=0.3, KL=0.01).items():
        monkeypatch.setattr(baselines, f"PPO_{name}", value)
    r = run("ppo", iterations=2, rollouts=4, ppo_lr=1e-2)
    kl = [r.done[f"iter{i}/target-agent"]["kl"] for i in (1, 2)]
    assert kl[0] == pytest.approx(0, abs=1e-5) and kl[1] > 0.01
    assert [row["i"] for row in r.done.values() if row["function"] == "evaluate"] == [0, 1, 2]
    steps = rows(r, "iter1/target-agent/train.jsonl")
    assert len(steps) == 3 * math.ceil(TASKS / 2)
    for policy, groups, how in seen:
        assert how == dict(clip=0.3, kl=0.01)
        sampled = torch.tensor([x for t in dpo.trajectories_of(groups) for x in t.log_probs])
        assert torch.allclose(torch.cat([group.old_log_probs for group in groups]), sampled, atol=1e-4)
    # The first step's ratios are 1 and its divergences 0: its loss is - sum of A over tokens.
    total, tokens = 0.0, 0
    for t in dpo.trajectories_of(seen[0][1]):
        rewards = [e["reward"] for e in rows(r, "iter1/target.jsonl") if e["task"] == t.task]
        total += t.action_count * (t.reward - (sum(rewards) - t.reward) / 3)
        tokens += t.action_count
    assert steps[0]["loss"] == pytest.approx(-total / tokens, abs=1e-6)


def test_ppo_without_two_rollouts_to_compare_leaves_the_agent_as_it_is(run, capsys):
    sft = run("sft")
    length = max(len(e["ids"]) for e in rows(sft, "experts.jsonl"))
    r = run("ppo", out="ppo", max_tokens=length, max_new_tokens=3)  # all fill the context
    assert {e["ended"] for e in rows(r, "iter1/target.jsonl")} == {"context_limit"}
    assert "no two rollouts of a task" in capsys.readouterr().out
    assert apart(r, "sft-target", "iter1/target-agent") == 0
