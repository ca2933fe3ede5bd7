"""RFT, DART and PPO: by hand, and whole runs with a random model."""

from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import Toy

import dpo
import grpo
from common.files import read_jsonl
from dpo import Trajectory
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
def run(new_run):
    """run(method, **settings) -> the finished run."""
    def start(method, **changed):
        r = new_run(OneReply, Settings, **dict(
            method=method, iterations=1, max_new_tokens=5, sft_epochs=1, sft_lr=1e-4,
            temperature=1.5) | changed)
        METHODS[method].loop(r)
        return r

    return start


def rows(run, name):
    return read_jsonl(run.folder / f"{name}.jsonl")


# -------------------------------------------------------------------------------- RFT and DART


def played(task, reward, *replies, agent="target", opening=("a page",), ended="done"):
    turns = [dict(role="user", content=text) for text in opening]
    for text in replies:
        turns += [dict(role="assistant", content=text), dict(role="user", content="next")]
    return Trajectory(task, agent, reward=reward, turns=len(replies), messages=turns[:-1],
                      action_mask=[1], ended=ended)


FULL = played("a", 1.0, "y", ended="context_limit")


def test_join_by_hand():
    """A success joins with the expert's opening, without the shown example. It joins once, whatever
    thoughts precede its actions."""
    experts = [played("a", 1.0, "x", "y", agent="expert"), played("b", 1.0, "x", agent="expert")]
    shown = played("a", 1.0, "z", opening=("rules", "an example's task", "Observation: a page"))
    shown.messages[1]["role"] = "assistant"
    new = played("a", 1.0, "x")
    found, numbers = baselines.join_successes(SimpleNamespace(env=OneReply()), experts, [
        played("a", 0.9, "w"), played("a", 1.0, "x", "Thought: I know it.\nAction: y"), new,
        played("a", 1.0, "Thought: why not?\nAction:  x"), shown], [FULL, played("b", 1.0, "x")])
    assert found[:3] == [*experts, new]
    assert [[m["content"] for m in t.messages] for t in found[3:]] == [["a page", "z"]]
    assert numbers == dict(experts=2, successes=2, dropped={
        "failure": 1, "known already": 3, "too long": 1})


def test_rft_starts_from_the_base_again(run, monkeypatch):
    """If no sample succeeds, the second SFT begins like the first one. There is one batch, so the
    order does not matter."""
    monkeypatch.setattr(OneReply, "best", 3)
    r = run("rft")
    assert rows(r, "iter1/experts") == rows(r, "experts")
    [first], [second] = rows(r, "sft-target/train"), rows(r, "iter1/target-agent/train")
    assert second["loss"] == pytest.approx(first["loss"])


def test_dart_samples_more_where_the_first_samples_failed_and_adds_successes_of_both(run):
    r = run("dart", rollouts=4, dart_budget=10)
    first, more, joined = (rows(r, f"iter1/{name}") for name in ("target", "target-more", "experts"))
    failures = Counter(e["task"] for e in first if e["reward"] < 1)
    assert len({*failures.values()}) > 1  # or the test would say little
    assert Counter(e["task"] for e in first) == {f"toy-train-{i}": 4 for i in range(TASKS)}
    # The budget, times the share of failures: 2 of 10 for 1 of 4, 5 for 2, 8 for 3, 10 for 4
    extra = {task: [2, 5, 8, 10][n - 1] for task, n in failures.items()}
    assert Counter(e["task"] for e in more) == extra
    assert len({e["seed"] for e in first + more}) == len(first + more)
    assert {e["rollout"] < 4 for e in joined[TASKS:]} == {True, False}
    assert [row["i"] for row in r.done.values() if row["function"] == "evaluate"] == [0, 1]


# ----------------------------------------------------------------------------------------- PPO


def test_rollouts_without_another_to_compare_are_counted_and_leave_the_agent_as_it_is():
    """The task b has no rollouts."""
    one, other = played("a", 0.5, "x"), played("b", 1.0, "y")
    said = []
    run = SimpleNamespace(settings=None, name="iter1/target-agent", print=said.append)
    found = baselines.train_ppo(run, "agent", "sft", [one, other], [one, FULL], name="target", i=1)
    assert found == ("agent", dict(
        steps=0, dropped={"too long": 1, "the only rollout of its task": 1}))
    assert "no two rollouts of a task can be compared" in said[0]


def test_ppo_starts_at_the_sft_policy_and_moves(run, monkeypatch):
    """The old log-probabilities equal the sampler's, apart from rounding."""
    loss = Mock(wraps=baselines.clipped_loss)
    monkeypatch.setattr(baselines, "clipped_loss", loss)
    monkeypatch.setattr(baselines, "PPO_BATCH", 2)
    r = run("ppo", iterations=2, rollouts=4, ppo_lr=1e-2)
    before, after = (r.done[f"iter{i}/target-agent"]["kl"] for i in (1, 2))
    assert before == pytest.approx(0, abs=1e-5) and after > 0.01
    seen = [call.args[1] for call in loss.call_args_list]
    assert loss.call_args.kwargs == dict(clip_low=0.2, clip_high=0.2, kl=0.05, kl_term=grpo.k2)
    for groups in seen:
        sampled = torch.tensor([x for t in dpo.trajectories_of(groups) for x in t.log_probs])
        assert torch.allclose(torch.cat([group.old_log_probs for group in groups]), sampled, atol=1e-4)
    # The first step's ratios are 1 and its divergences 0: its loss is - sum of A over tokens.
    total = tokens = 0
    for t in dpo.trajectories_of(seen[0]):
        rewards = [e["reward"] for e in rows(r, "iter1/target") if e["task"] == t.task]
        total += t.action_count * (t.reward - (sum(rewards) - t.reward) / 3)
        tokens += t.action_count
    steps = rows(r, "iter1/target-agent/train")
    assert steps[0]["loss"] == pytest.approx(-total / tokens, abs=1e-6)
    assert len(steps) == 2 * TASKS / 2  # of two epochs
