"""RFT, DART and PPO: by hand, a bandit with a known best, and whole runs with a random model."""

import math
import random
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import Toy
from safetensors.torch import load_file

import coevolve
import dpo
import envs
from common.files import read_jsonl
from lab import baselines
from lab.settings import METHODS, Settings

TASKS = 8


class OneReply(Toy):
    """Pays (sum of the reply's letters modulo 5) / 4: a random reply succeeds one time in five."""
    max_steps = 1
    best = 4  # of (letters modulo 5); what agents write is capped here

    def reward(self):
        reply, = self.replies
        return 1.0 if reply == "c" else min(sum(map(ord, reply)) % 5, self.best) / 4

    def expert(self):
        return lambda observation: "c"


SMALL = dict(iterations=1, max_tokens=400, max_new_tokens=5, slots=8, sft_epochs=1, sft_lr=1e-4,
             temperature=1.5)


@pytest.fixture
def run(small_model, tmp_path, monkeypatch):
    """run(method, **settings) -> the finished run."""
    def start(method, out="run", **changed):
        monkeypatch.setattr(envs, "make", lambda name, view, **_: OneReply())
        values = SMALL | dict(method=method, model=str(small_model), out=str(tmp_path / out))
        r = coevolve.Run(Settings(**values | changed), envs.environment("webshop")())
        METHODS[method][0](r)
        return r

    return start


def rows(run, name):
    return read_jsonl(run.folder / name)


def weights(folder):
    return load_file(folder / "model.safetensors")


def row(task, reward, *replies, agent="target", opening=("a page",)):
    turns = [dict(role="user", content=text) for text in opening]
    for text in replies:
        turns += [dict(role="assistant", content=text), dict(role="user", content="next")]
    return dpo.Trajectory(task, agent, reward=reward, steps=len(replies), messages=turns[:-1])


def test_join_by_hand():
    experts = [row("a", 1.0, "x", "y", agent="expert"), row("b", 1.0, "x", agent="expert")]
    new, dropped = row("a", 1.0, "x"), Counter()
    found = baselines.join(experts, {
        "a": [row("a", 0.9, "z"), row("a", 1.0, "x", "Thought: I know it.\nAction: y"), new,
              row("a", 1.0, "Thought: why not?\nAction:  x")],
        "b": [row("b", 1.0, "x")]}, dropped, OneReply())
    assert found == [*experts, new]
    assert dropped == {"failure": 1, "known already": 3}


def test_a_joined_success_opens_as_the_expert_does_without_the_example_that_was_shown():
    shown = row("a", 1.0, "z", opening=("rules", "an example's task", "Observation: a page"))
    shown.messages[1]["role"] = "assistant"
    expert = row("a", 1.0, "x", agent="expert")
    joined = baselines.join([expert], {"a": [shown]}, Counter(), OneReply())
    assert [[m["content"] for m in t.messages] for t in joined] == [["a page", "x"], ["a page", "z"]]
    assert len(shown.messages) == 4


def new_successes(episodes):
    return {(e["task"], e["messages"][1]["content"]) for e in episodes if e["reward"] == 1} - {
        (f"toy-train-{i}", "c") for i in range(TASKS)}


def test_rft_adds_each_success_once(run):
    r = run("rft", samples=6)
    sampled = rows(r, "iter1/target.jsonl")
    assert Counter(e["task"] for e in sampled) == {f"toy-train-{i}": 6 for i in range(TASKS)}
    new, joined = new_successes(sampled), rows(r, "iter1/experts.jsonl")
    assert new and len(joined) == TASKS + len(new)
    assert new_successes(joined) == new
    assert r.done["iter1/experts.jsonl"]["successes"] == len(new)
    assert [row["i"] for row in r.done.values() if row["work"] == "evaluate"] == [0, 1]


def test_rft_starts_from_the_base_again(run, monkeypatch):
    """Where no sample succeeds, the second SFT is the first one (one batch: order is nothing)."""
    monkeypatch.setattr(OneReply, "best", 3)
    r = run("rft")
    a, b = weights(r.folder / "sft-target"), weights(r.folder / "iter1/target-agent")
    assert all(torch.allclose(a[name], b[name], atol=1e-7) for name in a)


@pytest.mark.parametrize("successes, extra", [(0, 10), (1, 8), (4, 2), (5, 0)])
def test_dart_gives_what_the_paper_gives(successes, extra):
    assert baselines.dart_rollouts([True] * successes + [False] * (5 - successes), 10) == extra


def test_dart_samples_more_where_the_first_samples_failed(run):
    r = run("dart", samples=4, dart_budget=8)
    first, more = (rows(r, f"iter1/{name}.jsonl") for name in ("target", "target-more"))
    failures, extra = Counter(), Counter(e["task"] for e in more)
    for e in first:
        failures[e["task"]] += e["reward"] < 1
    assert len(set(failures.values())) > 1  # or the test would say little
    assert all(extra[task] == 2 * n for task, n in failures.items())
    assert min(e["rollout"] for e in more) == 4
    assert len({(e["task"], e["seed"]) for e in first + more}) == len(first + more)
    joined = rows(r, "iter1/experts.jsonl")[TASKS:]
    assert new_successes(joined) == new_successes(first + more) and any(
        e["rollout"] >= 4 for e in joined)  # of the second sampling


# ----------------------------------------------------------------------------------------- PPO


class Table(torch.nn.Module):
    """A policy that is a row of logits, whatever came before: its probabilities are known."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits, dtype=torch.float64))

    def forward(self, input_ids, use_cache, logits_to_keep):
        return SimpleNamespace(logits=self.logits.expand(
            len(input_ids), len(logits_to_keep), len(self.logits)))


def played(tokens, reward=0.0):
    """An episode that reads token 0 and then writes the tokens given."""
    return dpo.Trajectory(ids=[0, *tokens], action_mask=[0] + [1] * len(tokens), reward=reward)


def rollouts(*tokens, advantages, old, sft):
    """A group of episodes; old, sft: the probabilities of all their tokens."""
    as_tensor = lambda row: torch.tensor(row, dtype=torch.float64).log()
    return baselines.Visit([*map(played, tokens)], advantages=advantages, old=as_tensor(old),
                              ref=as_tensor(sft))


def test_advantages_by_hand():
    assert baselines.leave_one_out([0.9, 0.6, 0.0]) == pytest.approx(
        [0.9 - 0.3, 0.6 - 0.45, 0.0 - 0.75])
    assert baselines.leave_one_out([0.5] * 4) == [0.0] * 4
    one, other, dropped = played([1], 0.5), played([1], 1.0), Counter()
    groups = baselines.with_advantages({"a": [one], "b": [one, other]}, dropped)
    assert [g.advantages for g in groups] == [[-0.5, 0.5]]
    assert dropped == {"the only rollout of its task": 1}


def test_the_objective_by_hand():
    """pi = (1/2, 1/4, 1/4). Three tokens of an episode with advantage 1, one with advantage -2.

    ratios, clip 0.2          A = 1                           A = -2
    token 0: .5/.5   = 1      min(1, 1) = 1
    token 1: .25/.2  = 1.25   min(1.25, 1.2) = 1.2
    token 2: .25/.4  = 0.625  min(0.625, 0.8) = 0.625
    token 1: .25/.2  = 1.25                                   min(-2.5, -2.4) = -2.5
    The last token's probability after SFT is 1/2, twice what it is now.
    """
    group = rollouts([0, 1, 2], [1], advantages=[1.0, -2.0], old=[.5, .2, .4, .2],
                     sft=[.5, .25, .25, .5])
    policy = torch.tensor([.5, .25, .25, .25], dtype=torch.float64).log()
    loss, _ = baselines.ppo_loss(policy, [group], clip=0.2, kl=0.1)
    assert loss.item() == pytest.approx(-(1 + 1.2 + 0.625 - 2.5) + 0.1 * math.log(2) ** 2 / 2)


def test_a_bandit_is_solved():
    """Three actions worth 0, 0.5 and 1. The best policy is known: proportional to
    pi_SFT exp(reward / kl)."""
    worth, sft, kl = torch.tensor([0.0, 0.5, 1.0]), Table([1.0, 0.5, 0.0]), 0.5
    policy, rng = Table([1.0, 0.5, 0.0]), torch.Generator().manual_seed(0)
    for i in range(40):
        chances = torch.softmax(policy.logits.detach(), -1)
        taken = torch.multinomial(chances, 64, replacement=True, generator=rng).tolist()
        rollouts = {}
        for n in range(4):
            rollouts[n] = [played([token], worth[token].item()) for token in taken[n::4]]
        visits = baselines.with_advantages(rollouts, Counter())
        for visit in visits:
            with torch.no_grad():
                visit.old = dpo.token_log_probs(policy, visit.trajectories)
                visit.ref = dpo.token_log_probs(sft, visit.trajectories)
        steps = []
        for _ in range(4):
            steps += dpo.batches(visits, 1, "instructions", random.Random(i))
        loss = partial(baselines.ppo_loss, clip=0.2, kl=kl)
        objective = dpo.Objective(loss, coevolve.action_count, lr=0.05)
        optimizer = dpo.adamw(policy.eval(), objective)
        for _ in dpo.training(policy, optimizer, steps, objective, dpo.token_log_probs):
            pass
    found = torch.softmax(policy.logits.detach(), -1)
    best = torch.softmax(sft.logits.detach() + worth / kl, -1)
    assert found.tolist() == pytest.approx(best.tolist(), abs=0.06)


def test_ppo_starts_at_the_sft_policy_and_moves(run):
    r = run("ppo", iterations=2, ppo_rollouts=4, ppo_lr=1e-2)
    kl = [r.done[f"iter{i}/target-agent"]["kl"] for i in (1, 2)]
    assert kl[0] == pytest.approx(0, abs=1e-5) and kl[1] > 0.01
    # The first step's ratios are 1 and its divergences 0: its loss is - sum of A over tokens.
    episodes, total, tokens = rows(r, "iter1/target.jsonl"), 0.0, 0
    assert len(episodes) == 4 * TASKS
    for e in episodes:
        others = [o["reward"] for o in episodes if o["task"] == e["task"] and o is not e]
        total += sum(e["action_mask"]) * (e["reward"] - sum(others) / 3)
        tokens += sum(e["action_mask"])
    loss = rows(r, "iter1/target-agent/train.jsonl")[0]["loss"]
    assert loss == pytest.approx(-total / tokens, abs=1e-6)
    assert [row["i"] for row in r.done.values() if row["work"] == "evaluate"] == [0, 1, 2]


def test_ppo_weighs_tokens_by_the_distribution_that_they_were_drawn_from(run, monkeypatch):
    """The old log-probabilities are those that the sampler had, but for rounding."""
    seen, loss = [], baselines.ppo_loss
    monkeypatch.setattr(baselines, "ppo_loss", lambda policy, groups, **how: seen.append(
        (policy.detach(), groups, how)) or loss(policy, groups, **how))
    r = run("ppo", ppo_clip=0.3, ppo_kl=0.01, ppo_epochs=3, ppo_batch=2)
    for policy, groups, how in seen:
        assert how == dict(clip=0.3, kl=0.01)
        sampled = torch.tensor([x for t in dpo.trajectories_of(groups) for x in t.log_probs])
        for found in (torch.cat([g.old for g in groups]), *([policy] if groups is seen[0][1] else [])):
            assert torch.allclose(found, sampled, atol=1e-4)
    steps = rows(r, "iter1/target-agent/train.jsonl")
    assert len(steps) == 3 * math.ceil(TASKS / 2)


def test_ppo_without_two_rollouts_to_compare_leaves_the_agent_as_it_is(run, capsys):
    sft = run("sft")
    length = max(len(e["ids"]) for e in rows(sft, "experts.jsonl"))
    r = run("ppo", out="ppo", max_tokens=length, max_new_tokens=3)  # all fill the context
    assert {e["ended"] for e in rows(r, "iter1/target.jsonl")} == {"context"}
    assert "no two rollouts" in capsys.readouterr().out
    a, b = weights(r.folder / "sft-target"), weights(r.folder / "iter1/target-agent")
    assert all(torch.equal(a[name], b[name]) for name in a)
