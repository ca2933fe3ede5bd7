"""The baselines of arXiv 2511.22254 that need a loop of their own: RFT, DART and PPO.

RFT is rejection-sampling fine-tuning: the agent's successes join the expert trajectories, from
which an agent is trained by SFT, supervised fine-tuning. DART is RFT with more samples of difficult
tasks. PPO is proximal policy optimisation, here with one advantage for a whole episode. Sections
are those of the paper.

A method is a loop over phases, a tuple of the settings that it reads, and an entry in METHODS. The
shortest example is `rft`, which has phases of `coevolve.py` and two more.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import dpo
from coevolve import (
    Common,
    by_task,
    evaluate_all,
    expert_paths,
    explore,
    summarise,
    train_sft,
    usable,
)
from common.files import seed_of
from common.settings import Method, Rate, Stated, Whole
from dpo import Trajectory, action_count
from engine.experts import collect_experts
from engine.records import read, write
from engine.run import Run
from environments import first_reply
from envs import Environment
from evolve import TaskGroup, store_log_probs, token_advantages

PPO_EPOCHS = 2  # number of epochs over the trajectories of an iteration [ours]
PPO_BATCH = 16  # number of tasks per optimiser step, with all their rollouts [ours]
PPO_CLIP = 0.2  # distance from 1 at which ratios are clipped [Schulman et al. 2017]
PPO_KL = 0.05   # weight of the KL divergence from the agent after SFT [ours]

# -------------------------------------------------------------------------------- RFT and DART


def rft(run: Run) -> None:
    """Trains an agent by RFT (Section 5.1), or by DART (Section 5.3).

    The agent after SFT plays the training tasks. Its successes join the expert trajectories, and
    the base model is fine-tuned on all of them. With --method dart, tasks in which successes are
    rare are played more often.
    """
    once = run.once
    experts, agent = train_on_experts(run)
    played = [once("iter1/target.jsonl", explore, agent, experts, name="target", i=1)]
    if run.settings.method == "dart":
        played.append(once("iter1/target-more.jsonl", explore_more, agent, *played, name="target",
                           i=1))
    joined = once("iter1/experts.jsonl", join_successes, experts, played)
    agent = once("iter1/target-agent", train_sft, run.base, joined, name="target")
    evaluate_all(run, {"target": agent}, 1)


def train_on_experts(run: Run) -> tuple[Path, Path]:
    """Collects the expert trajectories, trains an agent on them by SFT, and evaluates it.

    Returns the file of expert trajectories, and the folder of the agent.
    """
    experts = run.once("experts.jsonl", collect_experts, *expert_paths(run.settings))
    agent = run.once("sft-target", train_sft, run.base, experts, name="target")
    evaluate_all(run, {"target": agent}, 0)
    return experts, agent


def explore_more(run: Run, out: Path, agent: Path, played: Path, name: str, i: int) -> dict:
    """Samples additional rollouts for DART.

    The more of a task's first rollouts failed, the more additional rollouts it gets.

    Args:
        run: The run.
        out: The file of trajectories to write.
        agent: The folder of the agent's model.
        played: The file of its first rollouts. The indices of new rollouts continue after theirs.
        name: The agent's name.
        i: The iteration.

    Returns:
        The averages over the new trajectories, see `coevolve.summarise`.
    """
    s = run.settings
    successes = defaultdict(list)  # task -> for each of its rollouts, whether it succeeded
    for t in read(played):
        successes[t.task].append(not t.is_failure)

    episodes = []
    for task, flags in successes.items():
        first = len(flags)
        for n in range(first, first + dart_rollouts(flags, s.dart_budget)):
            episodes.append(Trajectory(task, name, i, n, seed_of(s.seed, name, i, task, n)))
    trajectories = run.play(agent, episodes, s.temperature)
    write(run, out, trajectories)
    return summarise(trajectories, s.hard_threshold) if trajectories else dict(episodes=0)


def dart_rollouts(successes: list[bool], budget: int) -> int:
    """Returns the number of additional rollouts of a task.

    Section 5.3 computes a difficulty "based on the fraction of successful rollouts", and multiplies
    it by the budget N. We read this as N (1 - successes / n), where n is the number of first
    rollouts, and round it.

    Args:
        successes: Whether each of the n first rollouts was a success.
        budget: The budget N.
    """
    return round(budget * (1 - sum(successes) / len(successes)))


def join_successes(run: Run, out: Path, experts: Path, played: list[Path]) -> dict:
    """Writes the expert trajectories and the agent's successes into one file.

    Args:
        run: The run.
        out: The file to write.
        experts: The file of expert trajectories.
        played: The files of the agent's trajectories.

    Returns:
        The number of expert trajectories and of successes that joined them, and of trajectories
        that did not, by reason.
    """
    dropped = Counter()
    of_experts = read(experts)
    joined = join(of_experts, by_task(usable(read(*played), dropped)), dropped, run.env)
    write(run, out, joined)
    return dict(experts=len(of_experts), successes=len(joined) - len(of_experts), dropped=dropped)


def join(experts: list[Trajectory], sampled: dict[str, list[Trajectory]], dropped: Counter,
         env: Environment) -> list[Trajectory]:
    """Adds sampled successes to the expert trajectories.

    Trajectories with equal actions are duplicates, even if their thoughts differ. Only the first of
    them is kept, and expert trajectories take precedence.

    Args:
        experts: The expert trajectories.
        sampled: A dict that maps each task to its sampled trajectories.
        dropped: The counter of trajectories that do not join, by reason.
        env: The environment, which finds the action in a reply.

    Returns:
        The expert trajectories, followed by the successes.
    """
    joined = list(experts)
    known = {task_and_actions(expert, env) for expert in experts}
    openings = {expert.task: split_opening(expert)[0] for expert in experts}
    for trajectories in sampled.values():
        for t in trajectories:
            if t.is_failure:
                dropped["failure"] += 1
            elif task_and_actions(t, env) in known:
                dropped["known already"] += 1
            else:
                # With --protocol eto, agents are shown an example, which experts are not. The
                # success therefore gets the opening of the expert trajectory.
                known.add(task_and_actions(t, env))
                joined.append(replace(t, messages=openings[t.task] + split_opening(t)[1]))
    return joined


def split_opening(t: Trajectory) -> tuple[list[dict], list[dict]]:
    """Splits a conversation into the messages before the agent's first reply, and the rest."""
    n = first_reply(t.messages, t.turns)
    return t.messages[:n], t.messages[n:]


def task_and_actions(t: Trajectory, env: Environment) -> tuple[str, ...]:
    """Returns a trajectory's task and its actions, with normalised whitespace."""
    key = [t.task]
    for message in split_opening(t)[1]:
        if message["role"] == "assistant":
            action = env.action(message["content"]) or ""
            key.append(" ".join(action.split()))
    return tuple(key)


# ----------------------------------------------------------------------------------------- PPO


def ppo(run: Run) -> None:
    """Trains an agent by PPO, which "directly optimizes the SFT policy" for the reward.

    Section 5.1 says no more about it. Here, the reward comes at the end of an episode, all action
    tokens of the episode have the same advantage, and there is no value network [ours].
    """
    s = run.settings
    experts, after_sft = train_on_experts(run)
    agent = after_sft
    for i in range(1, s.iterations + 1):
        played = run.once(f"iter{i}/target.jsonl", explore, agent, experts, name="target", i=i)
        agent = run.once(f"iter{i}/target-agent", train_ppo, agent, after_sft, played,
                         name="target", i=i)
        evaluate_all(run, {"target": agent}, i)


def train_ppo(run: Run, out: Path, agent: Path, after_sft: Path, played: Path, name: str,
              i: int) -> dict:
    """Trains an agent by PPO on its own trajectories of one iteration.

    Args:
        run: The run.
        out: The folder of the trained agent.
        agent: The folder of the agent that played.
        after_sft: The folder of the agent after SFT. The KL term keeps the policy near it.
        played: The file of the agent's trajectories.
        name: The agent's name.
        i: The iteration.

    Returns:
        The KL divergence from the agent after SFT before this phase, in nats per trajectory, the
        number of trajectories dropped for each reason, and the numbers that `Run.fit` returns.
    """
    # 1. Group the rollouts by task.
    s = run.settings
    dropped = Counter()
    groups = make_groups(by_task(usable(read(played), dropped)), dropped)
    if not groups:
        run.print(f"{run.name}: the agent is left unchanged, because no two rollouts of a task can "
                f"be compared ({dict(dropped)})")
        return run.copy_agent(agent, out) | dict(dropped=dropped)

    # 2. Compute log pi_SFT and log pi_old. All log-probabilities, also those in training, are under
    # the distribution that the episodes were sampled from. One model is in memory at a time.
    sampler = run.encoder.sampler(s.temperature)
    log_probs = partial(run.log_probs, logits_processor=sampler.process_logits)
    store_log_probs(groups, "ref_log_probs", run.load(after_sft), log_probs)
    model = run.load(agent)
    store_log_probs(groups, "old_log_probs", model, log_probs)
    kl = sum((group.old_log_probs - group.ref_log_probs).sum().item() for group in groups)

    # 3. Train for several epochs over the groups.
    rng = random.Random(seed_of(s.seed, "ppo", i))
    steps = dpo.batches(groups, PPO_BATCH, rng, PPO_EPOCHS)
    rates = dpo.learning_rates(len(steps), s.ppo_lr, s.dpo_warmup)
    loss = partial(ppo_loss, clip=PPO_CLIP, kl=PPO_KL)
    numbers = run.fit(model, out, steps, rates, loss, action_count, log_probs)
    return dict(kl=kl / len(dpo.trajectories_of(groups)), dropped=dropped, **numbers)


def make_groups(rollouts: dict[str, list[Trajectory]], dropped: Counter) -> list[TaskGroup]:
    """Makes a task group with advantages for each task that has at least two rollouts.

    Args:
        rollouts: A dict that maps each task to its trajectories.
        dropped: The counter of unused trajectories by reason. A task's only rollout is unused.
    """
    groups = []
    for trajectories in rollouts.values():
        if len(trajectories) == 1:
            dropped["the only rollout of its task"] += 1
        else:
            advantages = leave_one_out([t.reward for t in trajectories])
            groups.append(TaskGroup(trajectories, advantages=advantages))
    return groups


def leave_one_out(rewards: list[float]) -> list[float]:
    """Computes leave-one-out advantages: each reward minus the mean of the other rewards.

    This mean is an unbiased baseline (Kool et al. 2019; Ahmadian et al. 2024, who call it RLOO).
    There must be at least two rewards.
    """
    total = sum(rewards)
    n = len(rewards)
    return [reward - (total - reward) / (n - 1) for reward in rewards]


def ppo_loss(policy: Tensor, groups: list[TaskGroup], clip: float,
             kl: float) -> tuple[dict, dict]:
    """Computes PPO's clipped objective with a KL term, summed over the action tokens t_k.

        L = sum_k  -min(rho_k A_k, clip(rho_k, 1 - clip, 1 + clip) A_k) + kl/2 (log pi/pi_SFT)^2

    The clipped objective is that of Schulman et al. (2017). rho_k = pi(t_k|.) / pi_old(t_k|.) is
    the ratio of the policy to the one that played, and A_k is the advantage of the trajectory that
    contains t_k. On samples from pi, the expected gradient of the squared term is the gradient of
    the tokens' KL(pi || pi_SFT).

    Args:
        policy: log pi(t_k|.) of all A action tokens, (A,), in nats.
        groups: The task groups, with advantages and log-probabilities of pi_old and of pi_SFT.
        clip: The distance from 1 at which rho_k is clipped.
        kl: The weight of the KL term.

    Returns:
        {loss: ()}, and an empty dict of statistics.
    """
    old = torch.cat([group.old_log_probs for group in groups]).to(policy)         # (A,)
    sft = torch.cat([group.ref_log_probs for group in groups]).to(policy)         # (A,)
    advantage = policy.new_tensor(token_advantages(groups))                       # (A,)
    ratio = (policy - old).exp()                                                  # (A,) rho
    clipped = ratio.clamp(1 - clip, 1 + clip)
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)
    return dict(loss=(kl * (policy - sft) ** 2 / 2 - surrogate).sum()), {}


# ------------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class Baselines(Stated):
    """DART and PPO"""
    # The budget N of DART: a task gets N additional rollouts, times the fraction of its first
    # rollouts that failed [Section 5.3]
    dart_budget: Whole = 10
    # The learning rate of PPO, constant after the warmup of --dpo-warmup [ours]
    ppo_lr: Rate = 1e-6

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        return [*super().conflicts(s),
                (s.method == "ppo" and s.rollouts < 2, f"--rollouts {s.rollouts}",
                 "PPO compares the rollouts of a task; give at least 2")]


METHODS = {
    "rft": Method(rft, (Common, "temperature", "rollouts"),
                  "SFT once more, with the agent's own successes"),
    "dart": Method(rft, (Common, "temperature", "rollouts", "dart_budget"),
                   "RFT with more rollouts of tasks in which successes are rare"),
    "ppo": Method(ppo, (Common, "temperature", "rollouts", "iterations", "dpo_warmup", "ppo_lr"),
                  "PPO on the agent's own episodes", group=lambda s: s.rollouts),
}
