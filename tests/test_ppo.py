"""PPO by hand: advantages, the clipped objective, its gradient, and a bandit with a known best."""

import math
import random
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import adamw
from test_dpo import sequence

from lab import tokens as dpo
from lab.baselines import ppo


class Table(torch.nn.Module):
    """A policy that is a row of logits, whatever came before: its probabilities are known."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits, dtype=torch.float64))

    def forward(self, input_ids, logits_to_keep, **layout):
        return SimpleNamespace(logits=self.logits.expand(1, len(logits_to_keep), -1))


def episodes(*tokens, advantages, old, ref):
    """A group of episodes that read token 0 and then write the tokens given."""
    found = [sequence([0, *ids], [0] + [1] * len(ids)) for ids in tokens]
    as_tensors = lambda rows: [torch.tensor(row, dtype=torch.float64).log() for row in rows]
    return dpo.Rollouts("task", found, advantages=advantages, old=as_tensors(old),
                        ref=as_tensors(ref))


def read(accelerator, model, groups, name, sampler, tokens):
    """Sets the field `name` (old or ref) of the groups by a model."""
    found = dpo.log_probs_of(accelerator, model, groups, tokens, sampler=sampler)
    for g, log_probs in zip(groups, found):
        setattr(g, name, log_probs)


def test_leave_one_out_by_hand():
    assert ppo.leave_one_out([1.0, 0.0]) == [1.0, -1.0]
    assert ppo.leave_one_out([0.9, 0.6, 0.0]) == pytest.approx([0.9 - 0.3, 0.6 - 0.45, 0.0 - 0.75])
    assert ppo.leave_one_out([0.5] * 4) == [0.0] * 4


def test_an_instruction_with_a_single_rollout_is_left_out_and_counted():
    one, other = (dpo.Trajectory(ids=[1, 2], action_mask=[0, 1], reward=r) for r in (0.5, 1.0))
    dropped = Counter()
    groups = ppo.groups_of({"a": [one], "b": [one, other]}, dropped)
    assert [(g.task, g.advantages) for g in groups] == [("b", [-0.5, 0.5])]
    assert dropped == {"the only rollout of its instruction": 1}


def test_the_objective_by_hand():
    """pi = (1/2, 1/4, 1/4). Three tokens of an episode with advantage 1, one with advantage -2.

    ratios, clip 0.2          A = 1                           A = -2
    token 0: .5/.5   = 1      min(1, 1) = 1
    token 1: .25/.2  = 1.25   min(1.25, 1.2) = 1.2
    token 2: .25/.4  = 0.625  min(0.625, 0.8) = 0.625
    token 1: .25/.2  = 1.25                                   min(-2.5, -2.4) = -2.5
    """
    model = Table([math.log(2), 0.0, 0.0])
    group = episodes([0, 1, 2], [1], advantages=[1.0, -2.0], old=[[.5, .2, .4], [.2]],
                     ref=[[.5, .25, .25], [.5]])
    surrogate = 1 + 1.2 + 0.625 - 2.5
    loss, _ = ppo.ppo_loss(model, [group], dpo.Sampler(), clip=0.2, kl=0.0)
    assert loss.item() == pytest.approx(-surrogate)
    loss, _ = ppo.ppo_loss(model, [group], dpo.Sampler(), clip=0.2, kl=0.1)
    assert loss.item() == pytest.approx(-surrogate + 0.1 * math.log(2) ** 2 / 2)


def test_the_kl_terms_gradient_is_that_of_the_divergence():
    """All three actions as often as the policy takes them: 2, 1 and 1 of 4."""
    model, sft = Table([math.log(2), 0.0, 0.0]), [0.2, 0.5, 0.3]
    taken = [0, 0, 1, 2]
    group = episodes(*([t] for t in taken), advantages=[0.0] * 4,
                     old=[[[.5, .25, .25][t]] for t in taken], ref=[[sft[t]] for t in taken])
    loss, _ = ppo.ppo_loss(model, [group], dpo.Sampler(), clip=0.2, kl=1.0)
    (loss / 4).backward()
    found = model.logits.grad.clone()
    model.zero_grad()
    log_pi = torch.log_softmax(model.logits, -1)
    (log_pi.exp() * (log_pi - torch.tensor(sft, dtype=torch.float64).log())).sum().backward()
    assert found.tolist() == pytest.approx(model.logits.grad.tolist())


@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_a_bandit_is_solved(kl):
    """Three actions worth 0, 0.5 and 1. The best policy is known: proportional to
    pi_SFT exp(reward / kl), which without the KL term is the best action alone."""
    worth, sft = torch.tensor([0.0, 0.5, 1.0]), Table([1.0, 0.5, 0.0])
    policy, rng = Table([1.0, 0.5, 0.0]), torch.Generator().manual_seed(0)
    for i in range(40):
        with torch.no_grad():
            chances = torch.softmax(policy.logits, -1)
        taken = torch.multinomial(chances, 64, replacement=True, generator=rng).tolist()
        played = [dpo.Trajectory(ids=[0, t], action_mask=[0, 1], reward=worth[t].item())
                  for t in taken]
        groups = ppo.groups_of({"bandit": played}, Counter())
        for model, name in ((policy, "old"), (sft, "ref")):
            read(Accelerator(cpu=True), model, groups, name, dpo.Sampler(), 1000)
        epochs = [dpo.batches(groups, 16, "instructions", random.Random(i)) for _ in range(4)]
        loss = partial(ppo.ppo_loss, sampler=dpo.Sampler(), clip=0.2, kl=kl)
        dpo.fit(Accelerator(cpu=True), policy, epochs,
                dpo.Objective(loss, dpo.count_action_tokens), adamw(lr=0.05), lambda event: None)
    found = torch.softmax(policy.logits.detach(), -1)
    best = torch.softmax(sft.logits.detach() + worth / kl, -1) if kl else torch.tensor([0., 0., 1.])
    assert found.tolist() == pytest.approx(best.tolist(), abs=0.06)


def test_the_divergence_is_counted_per_episode():
    group = episodes([0, 1], [2], advantages=[0.0, 0.0], old=[[.5, .5], [.5]],
                     ref=[[.25, .5], [.5]])
    assert dpo.kl_of([group]) == pytest.approx(math.log(2) / 2)
