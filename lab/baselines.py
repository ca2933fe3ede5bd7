"""The baselines RFT, DART and PPO of arXiv 2511.22254.

These baselines have their own training loops. The baselines SFT and ETO use the loop in
`coevolve.py`.

    RFT    rejection-sampling fine-tuning: the agent samples episodes, its successes are added to
           the expert trajectories, and SFT (supervised fine-tuning) is run on all of them
    DART   RFT with more sampled episodes of difficult tasks
    PPO    proximal policy optimisation, here with a single advantage for each episode

Section numbers such as [Section 5.1] refer to the paper.

To write a method of your own, write a function that calls phases, and add it to METHODS together
with the settings that it reads. The shortest example is `rft`. It uses some phases of `coevolve.py`
and two new ones, `explore_more` and `join_successes`.
"""

from __future__ import annotations

import random
from collections import Counter
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
PPO_BATCH = 16  # batch size in tasks; all rollouts of a task are in the same batch [ours]
PPO_CLIP = 0.2  # ratios are clipped to the range 1 - 0.2 to 1 + 0.2 [Schulman et al. 2017]
PPO_KL = 0.05   # weight of the KL divergence from the agent after SFT [ours]

# -------------------------------------------------------------------------------- RFT and DART


def rft(run: Run) -> None:
    """Trains an agent with RFT (Section 5.1), or with DART (Section 5.3).

    The agent after SFT plays the training tasks. Its successes are added to the expert
    trajectories. Then the base model is fine-tuned on the combined data. With --method dart, the
    agent plays more episodes of those tasks in which it often fails.
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

    Returns the path of the expert trajectory file, and the folder of the agent's model.
    """
    experts = run.once("experts.jsonl", collect_experts, *expert_paths(run.settings))
    agent = run.once("sft-target", train_sft, run.base, experts, name="target")
    evaluate_all(run, {"target": agent}, 0)
    return experts, agent


def explore_more(run: Run, out: Path, agent: Path, played: Path, name: str, i: int) -> dict:
    """Samples additional rollouts for DART.

    Difficult tasks, in which many of the first rollouts failed, get more additional rollouts.

    Args:
        run: The run.
        out: The trajectory file to write.
        agent: The folder of the agent's model.
        played: The file of the first rollouts. If a task has n first rollouts, the indices of its
            additional rollouts start at n.
        name: The agent's name.
        i: The iteration.

    Returns:
        The metrics of the new trajectories, see `coevolve.summarise`.
    """
    s = run.settings
    episodes = []
    for task, rollouts in by_task(read(played)).items():
        first = len(rollouts)
        more = dart_rollouts([not t.is_failure for t in rollouts], s.dart_budget)
        for n in range(first, first + more):
            episodes.append(Trajectory(task, name, i, n, seed_of(s.seed, name, i, task, n)))
    trajectories = run.play(agent, episodes, s.temperature)
    write(run, out, trajectories)
    return summarise(trajectories, s.hard_threshold) if trajectories else dict(episodes=0)


def dart_rollouts(successes: list[bool], budget: int) -> int:
    """Returns the number of additional rollouts of a task.

    Section 5.3 computes the difficulty of a task "based on the fraction of successful rollouts",
    and multiplies it by the budget N. We use round(N (1 - successes / n)), where n is the number of
    first rollouts of the task. This formula is our reading of the text.

    Args:
        successes: One bool for each of the n first rollouts, True if the rollout was a success.
        budget: The budget N.
    """
    return round(budget * (1 - sum(successes) / len(successes)))


def join_successes(run: Run, out: Path, experts: Path, played: list[Path]) -> dict:
    """Writes the expert trajectories and the agent's successes into one file.

    Args:
        run: The run.
        out: The file to write.
        experts: The file of expert trajectories.
        played: The agent's trajectory files.

    Returns:
        The number of expert trajectories (`experts`), the number of added successes (`successes`),
        and the number of trajectories that were not added, by reason (`dropped`).
    """
    dropped = Counter()
    of_experts = read(experts)
    joined = join(of_experts, by_task(usable(read(*played), dropped)), dropped, run.env)
    write(run, out, joined)
    return dict(experts=len(of_experts), successes=len(joined) - len(of_experts), dropped=dropped)


def join(experts: list[Trajectory], sampled: dict[str, list[Trajectory]], dropped: Counter,
         env: Environment) -> list[Trajectory]:
    """Adds sampled successes to the expert trajectories.

    Two trajectories of a task are duplicates if they have the same actions, even if their thoughts
    differ. A success is not added if it duplicates an expert trajectory or an earlier success.

    Args:
        experts: The expert trajectories.
        sampled: A dict that maps each task to its sampled trajectories.
        dropped: A counter of trajectories that are not added, by reason.
        env: The environment. Its method `action` extracts the action from a reply.

    Returns:
        The expert trajectories, followed by the added successes.
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
                # With --protocol eto, the agent's prompt has an example, but the prompt of expert
                # trajectories has none. SFT should use the same prompt for both, so we replace the
                # opening of the success with the opening of the expert trajectory.
                known.add(task_and_actions(t, env))
                joined.append(replace(t, messages=openings[t.task] + split_opening(t)[1]))
    return joined


def split_opening(t: Trajectory) -> tuple[list[dict], list[dict]]:
    """Splits a conversation before the agent's first reply.

    Returns the messages before the first reply (the opening), and all other messages.
    """
    n = first_reply(t.messages, t.turns)
    return t.messages[:n], t.messages[n:]


def task_and_actions(t: Trajectory, env: Environment) -> tuple[str, ...]:
    """Returns a tuple with the task and all actions of a trajectory, to detect duplicates.

    Whitespace in the actions is normalised.
    """
    key = [t.task]
    for message in split_opening(t)[1]:
        if message["role"] == "assistant":
            action = env.action(message["content"]) or ""
            key.append(" ".join(action.split()))
    return tuple(key)


# ----------------------------------------------------------------------------------------- PPO


def ppo(run: Run) -> None:
    """Trains an agent with PPO, which "directly optimizes the SFT policy" for the reward.

    Section 5.1 of the paper gives no other details. In our version, the reward is given at the end
    of an episode. All action tokens of an episode have the same advantage, and there is no value
    network.
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
    """Trains an agent with PPO on its own trajectories of one iteration.

    Args:
        run: The run.
        out: The folder of the trained agent.
        agent: The folder of the agent at the start of the iteration, which played the episodes.
        after_sft: The folder of the agent after SFT. The KL term keeps the policy close to it.
        played: The agent's trajectory file.
        name: The agent's name.
        i: The iteration.

    Returns:
        The result of `Run.fit`, and two more entries. `kl` is the KL divergence between the agent
        before this training and the agent after SFT, in nats per trajectory. `dropped` is the
        number of unused trajectories, by reason. If there are no groups, the agent is copied
        unchanged, and there is no `kl`.
    """
    # 1. Group the rollouts by task.
    s = run.settings
    dropped = Counter()
    groups = make_groups(by_task(usable(read(played), dropped)), dropped)
    if not groups:
        run.print(f"{run.name}: the agent is left unchanged, because no two rollouts of a task can "
                f"be compared ({dict(dropped)})")
        return run.copy_agent(agent, out) | dict(dropped=dropped)

    # 2. Compute log pi_SFT and log pi_old. Here and in training, log-probabilities refer to the
    # distribution that episodes were sampled from, which has a temperature and suppressed tokens.
    # Only one model is in memory at a time.
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
        dropped: A counter of unused trajectories, by reason. If a task has only one rollout, this
            rollout is not used, because there is no other rollout to compare it with.
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

    The mean of the other rewards is an unbiased baseline (Kool et al. 2019). Ahmadian et al. (2024)
    call this method RLOO (REINFORCE leave-one-out). It needs at least two rewards.
    """
    total = sum(rewards)
    n = len(rewards)
    return [reward - (total - reward) / (n - 1) for reward in rewards]


def ppo_loss(policy: Tensor, groups: list[TaskGroup], clip: float,
             kl: float) -> tuple[dict, dict]:
    """Computes the PPO loss: the clipped objective plus a KL term, summed over action tokens t_k.

        L = sum_k  -min(rho_k A_k, clip(rho_k, 1 - clip, 1 + clip) A_k) + kl/2 (log pi/pi_SFT)^2

    The clipped objective is from Schulman et al. (2017). rho_k = pi(t_k|.) / pi_old(t_k|.) is the
    ratio between the policy and pi_old, the policy that played the episodes. A_k is the advantage
    of the trajectory that contains t_k.

    The KL term is the squared log-ratio. If tokens are sampled from pi, its expected gradient is
    the gradient of the per-token KL(pi || pi_SFT).

    Args:
        policy: log pi(t_k|.) of all A action tokens, (A,), in nats.
        groups: The task groups. They need advantages, `old_log_probs` (under pi_old) and
            `ref_log_probs` (under pi_SFT).
        clip: rho_k is clipped to the range from 1 - clip to 1 + clip.
        kl: The weight of the KL term.

    Returns:
        A dict with the scalar `loss`, and an empty dict of statistics.
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
    # The budget N of DART: a task gets N x f additional rollouts, where f is the fraction of
    # failures among its first rollouts [Section 5.3]
    dart_budget: Whole = 10
    # The learning rate of PPO; it stays constant after a linear warmup (see --dpo-warmup) [ours]
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
