"""GRPO and PPO: advantages and losses by hand, and an update step."""

import math
import random
from functools import partial

import pytest
import torch
from conftest import make_model

import dpo
import grpo
from dpo import Trajectory


@pytest.mark.parametrize("rewards, of_grpo, of_ppo", [
    # mean 0.5, squares 4 x 0.25, over K - 1 = 3: std 0.57735; PPO: minus the mean of the others
    ([0.0, 1.0, 0.0, 1.0], [-0.866024, 0.866024] * 2, [-2 / 3, 2 / 3] * 2),
    ([0.9, 0.6, 0.0], [0.872870, 0.218217, -1.091087], [0.9 - 0.3, 0.6 - 0.45, 0.0 - 0.75]),
    ([0.5, 0.501], [-0.70611, 0.70611], [-0.001, 0.001]),
    ([0.5] * 3, [], [0.0] * 3), ([0.1 + 0.2, 0.3], [], [0.0] * 2)])  # they differ by rounding
def test_advantages_by_hand(rewards, of_grpo, of_ppo):
    assert grpo.advantages_of(rewards) == pytest.approx(of_grpo, abs=3e-6)
    assert grpo.leave_one_out(rewards) == pytest.approx(of_ppo, abs=1e-9)


# ---------------------------------------------------------------------------------------- losses


def logs(*chances):
    return [math.log(chance) for chance in chances]


def group(counts, advantages, old, ref):
    """Makes a task group of one trajectory for each of `counts`, which is its number of action
    tokens. `old` and `ref` are log pi_old and log pi_ref of all action tokens."""
    episodes = [Trajectory(ids=[0] * (n + 1), action_mask=[0] + [1] * n) for n in counts]
    return grpo.TaskGroup(episodes, advantages=advantages, old_log_probs=torch.tensor(old),
                          ref_log_probs=torch.tensor(ref))


GRPO = partial(grpo.clipped_loss, clip_low=0.2, clip_high=0.25, kl_term=grpo.k3)


def loss_of(policy, groups, kl, loss=GRPO):
    """Returns the loss, its derivative with respect to each log pi, and its statistics."""
    policy = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    losses, statistics = loss(policy, groups, kl=kl)
    losses["loss"].backward()
    return losses["loss"].item(), policy.grad.tolist(), statistics


def test_the_losses_by_hand():
    """There are two task groups, with three trajectories. GRPO clips ratios to 0.8 to 1.25 here, and
    PPO to 0.8 to 1.2. beta is 0.1.

    pi   old  ref    A  ratio  surrogate            its derivative, d log pi
    .5   .5   .5     1    1    1                    1
    .5   .25  .5     1    2    min(2, 1.25)         0
    .25  .5   .25    1   .5    min(.5, .8)          .5
    .5   .25  .5    -2    2    min(-4, -2.5)        -4
    .25  .5   .25   -2   .5    min(-1, -1.6)        0
    .25  .25  .5     0    1    0, and k3 = 2 - log 2 - 1, of which it is 1 - 2
                               PPO: 0, and k2 = (log 2)^2 / 2, of which it is -log 2
    """
    groups = [group([3], [1.0], logs(.5, .25, .5), logs(.5, .5, .25)),
              group([2, 1], [-2.0, 0.0], logs(.25, .5, .25), logs(.5, .25, .5))]
    policy = logs(.5, .5, .25, .5, .25, .25)
    loss, gradient, statistics = loss_of(policy, groups, 0.1)
    assert loss == pytest.approx(-(1 + 1.25 + .5 - 4 - 1.6) + 0.1 * (1 - math.log(2)))
    assert gradient == pytest.approx([-1, 0, -.5, 4, 0, -.1], abs=1e-6)
    assert statistics == {"action": dict(count=6, clipped=4)}
    ppo = partial(grpo.clipped_loss, clip_low=0.2, clip_high=0.2, kl_term=grpo.k2)
    loss, gradient, _ = loss_of(policy, groups, 0.1, ppo)
    assert loss == pytest.approx(-(1 + 1.2 + .5 - 4 - 1.6) + 0.1 * math.log(2) ** 2 / 2)
    assert gradient == pytest.approx([-1, 0, -.5, 4, 0, -0.1 * math.log(2)], abs=1e-6)


@pytest.mark.parametrize("d", [-99.0, 19.9, 21.0, 1e4])
def test_k3_far_from_the_reference_stays_finite_and_pulls_back(d):
    """Without an advantage the loss is beta k3. Above 20 nats, exp(d) continues as its tangent."""
    near = min(d, 20.0)
    exp_d = math.exp(near) * (1 + d - near)
    loss, gradient, _ = loss_of([-d], [group([1], [0.0], [-d], [0.0])], 2.0)
    assert loss == pytest.approx(2 * (exp_d - d - 1), rel=1e-5)
    assert gradient == pytest.approx([2 * (1 - math.exp(near))], rel=1e-5)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_far_away_stays_finite(advantage):
    loss, gradient, _ = loss_of([-1.0], [group([1], [advantage], [-1e4], [-1.0])], 1.0)
    assert math.isfinite(loss) and math.isfinite(*gradient)


# ------------------------------------------------------------------------------- the update step


def test_an_update_trains_on_the_groups_with_advantages():
    """Four tasks in two minibatches. Ratios are to the policy before the first of them. The task that
    is drawn first has equal rewards, hence no advantages, and leaves its minibatch."""
    equal, *order = random.Random(0).sample("abcd", 4)
    model, policy, pi_ref = (make_model(50, seed).eval() for seed in (1, 1, 2))
    rng = random.Random(1)
    rewards = dict.fromkeys(order, [0.0, 0.2, 1.0]) | {equal: [0.5, 0.5]}
    episodes = [Trajectory(task, ids=rng.choices(range(50), k=6), reward=reward,
                           action_mask=[0, 0, 1, 1, 0, 1])
                for task in "abcd" for reward in rewards[task]]
    for t in episodes:  # exp(0.3) and exp(-0.3) are outside of 0.8 to 1.28
        old = dpo.token_log_probs(policy, [t])
        t.log_probs = (old - torch.tensor([0.0, 0.3, -0.3])).tolist()
    groups = [grpo.make_group([t for t in episodes if t.task == task]) for task in order]
    for group in groups:
        group.old_log_probs = dpo.token_log_probs(policy, group.trajectories).detach()
        group.ref_log_probs = dpo.token_log_probs(pi_ref, group.trajectories).detach()
    kl = sum((group.old_log_probs - group.ref_log_probs).sum().item() for group in groups)

    loss = partial(GRPO, kl=0.1)
    update = partial(grpo.update, model, pi_ref, dpo.adamw(model), minibatch=2, lr=5e-3, loss=loss,
                     log_probs=dpo.token_log_probs, max_grad_norm=1e9)
    nothing = update([t for t in episodes if t.task == equal], rng=random.Random(0))
    assert nothing == dict(groups=0, updates=[], sampler={}, kl=0)
    numbers = update(episodes, rng=random.Random(0))
    # The loss is a mean over the action tokens of a minibatch.
    updates = dpo.train(policy, dpo.adamw(policy), [groups[:1], groups[1:]], [5e-3] * 2, loss,
                        dpo.action_count, max_grad_norm=1e9)
    assert numbers["updates"] == updates
    for p, expected in zip(model.parameters(), policy.parameters()):
        torch.testing.assert_close(p, expected, atol=1e-7, rtol=0)
    assert (numbers["groups"], numbers["kl"]) == (3, pytest.approx(kl / 9))
    mismatch = dict(mean=0.0, rms=math.sqrt(0.18 / 3), beyond=2 / 3)
    assert numbers["sampler"] == pytest.approx(mismatch, abs=1e-6)
