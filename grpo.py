"""GRPO and PPO: groups, advantages, the clipped loss, and the update step.

GRPO (group relative policy optimisation) trains the policy of `evolve.py`, and PPO (proximal policy
optimisation) is a baseline in `lab/baselines.py`. Both compare the trajectories of a task with each
other, and have no value network. This file imports only torch and `dpo.py`.

    pi       the policy, which is the model being trained
    pi_old   the policy that played the episodes
    pi_ref   the initial agent; the KL term keeps pi close to it
    R_k      the reward of the k-th trajectory of a task
    A_k      its advantage, a measure of how R_k compares with the other rewards of the task
    t_j      the j-th action token
    rho_j    pi(t_j|.) / pi_old(t_j|.)

Shapes: K is the number of trajectories in a task group. Lowercase `a` is the number of action
tokens in one group, and `A` is the number of action tokens in a list of groups. Tokens are
concatenated in the order of the groups. The tokens of a group are in the order of its trajectories.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import dpo
from dpo import Group, Trajectory, action_count, better

# Log-ratios of two policies are clamped to this maximum, in nats, before exp is computed [verl]. In
# fp32, exp overflows at 88.
MAX_LOG_RATIO = 20.0
# GRPO clips the ratio rho to the range from 1 - 0.2 to 1 + 0.28 [AgentEvolver].
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


@dataclass
class TaskGroup(Group):
    """The trajectories of one task, with the values that the loss needs.

    Each tensor contains log-probabilities log pi(t_j|.) of all action tokens t_j, in nats.
    """
    # The advantage of each trajectory, (K,). The list is empty if all rewards are equal. Such a
    # group is not used for training, because all its advantages would be 0.
    advantages: list[float] = field(default_factory=list)
    old_log_probs: Tensor | None = None  # (a,) log pi_old
    ref_log_probs: Tensor | None = None  # (a,) log pi_ref
    # (a,) log pi_old, as recorded by the sampler during the episodes. This tensor is used only for
    # logging (see `sampler_mismatch`), not in the loss.
    sampler_log_probs: Tensor | None = None


# ------------------------------------------------------------------------------- the advantages


def advantages_of(rewards: list[float]) -> list[float]:
    """Computes GRPO's advantages A_1..A_K of K trajectories from their rewards.

    Returns an empty list if all rewards are equal.
    """
    if not better(max(rewards), min(rewards)):  # all rewards are equal up to rounding
        return []
    reward = torch.tensor(rewards, dtype=torch.float64)                           # (K,)
    # A_k = (R_k - mean R) / (std R + 1e-6), where std divides by K - 1, as in verl
    advantage = reward - reward.mean()
    advantage = advantage / (reward.std() + 1e-6)
    return advantage.tolist()


def leave_one_out(rewards: list[float]) -> list[float]:
    """Computes leave-one-out advantages: each reward minus the mean of the other rewards.

    The mean of the other rewards is an unbiased baseline (Kool et al. 2019). Ahmadian et al. (2024)
    call this method RLOO (REINFORCE leave-one-out). It needs at least two rewards.
    """
    total = sum(rewards)
    n = len(rewards)
    return [reward - (total - reward) / (n - 1) for reward in rewards]


def token_advantages(groups: list[TaskGroup]) -> list[float]:
    """Returns the advantage of each action token, (A,).

    All action tokens of a trajectory have the advantage of the trajectory.
    """
    advantages = []
    for group in groups:
        for t, advantage in zip(group.trajectories, group.advantages):
            advantages += [advantage] * t.action_count
    return advantages


# -------------------------------------------------------------------------------------- the loss


def clipped_loss(
    policy: Tensor,
    groups: list[TaskGroup],
    clip_low: float,
    clip_high: float,
    kl: float,
    kl_term: Callable[[Tensor], Tensor],
) -> tuple[dict, dict]:
    """Computes the clipped objective with a KL term, summed over the action tokens of the groups.

        L = - sum_j [ min(rho_j A_j, clip(rho_j, 1 - clip_low, 1 + clip_high) A_j)
                      - beta kl_term(d_j) ]
        d_j = log pi_ref(t_j|.) - log pi(t_j|.)

    A_j is the advantage of the trajectory that contains t_j. The clipped objective is from Schulman
    et al. (2017).

    Args:
        policy: log pi(t_j|.), (A,), in nats.
        groups: The task groups. Each of them must have advantages.
        kl: The weight beta of the KL term.
        kl_term: `k3` for GRPO, `k2` for PPO. PPO uses equal `clip_low` and `clip_high`.

    Returns:
        A dict with the scalar `loss`, and statistics: the number of action tokens (`count`), and
        the number of those with a clipped ratio (`clipped`).
    """
    old = torch.cat([group.old_log_probs for group in groups]).to(policy)         # (A,)
    ref = torch.cat([group.ref_log_probs for group in groups]).to(policy)         # (A,)
    advantage = policy.new_tensor(token_advantages(groups))                       # (A,)

    # min(rho_j A_j, clip(rho_j, 1 - clip_low, 1 + clip_high) A_j)
    ratio = (policy - old).clamp(max=MAX_LOG_RATIO).exp()                         # (A,) rho
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantage, clipped_ratio * advantage)

    loss = -(surrogate - kl * kl_term(ref - policy)).sum()
    clipped = (ratio != clipped_ratio).sum().item()
    return dict(loss=loss), {"action": dict(count=len(ratio), clipped=clipped)}


def k3(d: Tensor) -> Tensor:
    """Computes exp(d) - d - 1, GRPO's estimate of KL(pi || pi_ref) from samples of pi, (A,).

    For d > MAX_LOG_RATIO, exp(d) is replaced with its tangent at MAX_LOG_RATIO. The tangent does
    not overflow, and its gradient still moves pi towards pi_ref.
    """
    bounded = d.clamp(max=MAX_LOG_RATIO)
    exp_d = bounded.exp() * (1 + (d - bounded))
    return exp_d - d - 1


def k2(d: Tensor) -> Tensor:
    """Computes d^2 / 2, (A,).

    If tokens are sampled from pi, the expected gradient of this term is the gradient of the
    per-token KL(pi || pi_ref).
    """
    return d ** 2 / 2


# ------------------------------------------------------------------------------- the update step


def update(
    model,
    pi_ref,
    optimizer: torch.optim.Optimizer,
    trajectories: list[Trajectory],
    minibatch: int,
    rng: random.Random,
    lr: float,
    loss: Callable,
    log_probs: Callable,
    **options,
) -> dict:
    """Trains the policy in place on the trajectories that it played in one step.

    Args:
        minibatch: The number of tasks in a minibatch. There is one optimiser step per minibatch.
        rng: The random number generator that shuffles the tasks.
        loss: A function loss(policy, groups), such as `clipped_loss`.
        log_probs: The same function as in `dpo.train`. Its log-probabilities have to be those of
            the distribution that the episodes were sampled from.
        options: Further arguments of `dpo.train`.

    Returns:
        A dict with the number of tasks with advantages (`groups`), the log of `dpo.train`
        (`updates`), the result of `sampler_mismatch` (`sampler`), and the estimate of
        KL(pi_old || pi_ref) in nats per trajectory (`kl`).
    """
    # 1. Group the trajectories by task.
    of_task = defaultdict(list)  # task id -> its trajectories
    for t in trajectories:
        of_task[t.task].append(t)
    played = [make_group(episodes) for episodes in of_task.values()]
    batches = minibatches(played, minibatch, rng)
    groups = list(itertools.chain(*batches))  # the groups with advantages

    # 2. Compute log pi_ref and log pi_old.
    if groups:
        store_log_probs(groups, "ref_log_probs", pi_ref, log_probs)
        store_log_probs(groups, "old_log_probs", model, log_probs)
    kl = sum((group.old_log_probs - group.ref_log_probs).sum().item() for group in groups)

    # 3. Run one update per minibatch. The loss is the mean over the minibatch's action tokens.
    updates = dpo.train(model, optimizer, batches, [lr] * len(batches), loss, action_count,
                        log_probs, **options)
    return dict(groups=len(groups), updates=updates, sampler=sampler_mismatch(groups),
                kl=kl / max(1, len(dpo.trajectories_of(groups))))


def make_group(episodes: list[Trajectory]) -> TaskGroup:
    """Makes a task group from the trajectories of one task, and computes their advantages."""
    rewards = []
    sampled = []
    for t in episodes:
        rewards.append(t.reward)
        sampled += t.log_probs
    return TaskGroup(episodes, advantages=advantages_of(rewards),
                     sampler_log_probs=torch.tensor(sampled))


def minibatches(groups: list[TaskGroup], size: int, rng: random.Random) -> list[list[TaskGroup]]:
    """Shuffles the groups, splits them into minibatches, and removes groups without advantages.

    Groups are removed after the split, so a minibatch may have fewer than `size` groups. Empty
    minibatches are left out.
    """
    batches = []
    for batch in dpo.batches(groups, size, rng):
        informative = [group for group in batch if group.advantages]
        if informative:
            batches.append(informative)
    return batches


@torch.no_grad()
def store_log_probs(groups: list[TaskGroup], name: str, policy, log_probs: Callable) -> None:
    """Computes log pi of all action tokens under a policy, and stores them in the groups.

    `name` is the field of TaskGroup that stores them: "ref_log_probs" or "old_log_probs".
    """
    values = log_probs(policy, dpo.trajectories_of(groups)).cpu()                 # (A,)
    counts = [action_count([group]) for group in groups]
    for group, part in zip(groups, values.split(counts)):
        setattr(group, name, part)


def sampler_mismatch(groups: list[TaskGroup]) -> dict:
    """Measures the difference between log-probabilities from training and from the sampler.

    Both are log-probabilities of the same tokens under pi_old. They differ only because of
    rounding. The difference is larger in bf16 than in fp32.

    Returns:
        The mean (`mean`) and the root mean square (`rms`) of the difference, in nats per token, and
        the fraction of tokens with exp(difference) outside the clip range (`beyond`). The dict is
        empty if there are no groups.
    """
    if not groups:
        return {}
    differences = [group.old_log_probs - group.sampler_log_probs for group in groups]
    difference = torch.cat(differences).double()                                  # (A,)
    ratio = difference.exp()
    beyond = ratio != ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return dict(
        mean=difference.mean().item(),
        rms=difference.square().mean().sqrt().item(),
        beyond=beyond.double().mean().item())
