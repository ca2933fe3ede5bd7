"""The baselines RFT, DART and PPO of arXiv 2511.22254.

These baselines have their own training loops. The baselines SFT and ETO use the loops in
`coevolve.py`.

    RFT    rejection-sampling fine-tuning: the agent samples episodes, its successes are added to
           the expert trajectories, and SFT (supervised fine-tuning) is run on all of them
    DART   RFT with more sampled episodes of difficult tasks
    PPO    proximal policy optimisation, here with a single advantage for each episode

Section numbers such as [Section 5.1] refer to the paper.

To write a method of your own, write a function that calls phases, and add it to METHODS together
with the settings that it reads. The shortest example is `rft`. It uses some phases of `coevolve.py`
and two new ones, `explore_more` and `join_successes`. The arguments of phases have the same meaning
as in `coevolve.py`. `played` contains the agent's rollouts of the iteration.
"""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import dpo
from coevolve import (
    DPO_WARMUP,
    Common,
    Model,
    Trajectories,
    by_task,
    evaluate_all,
    explore,
    is_usable,
    summarise,
    too_long,
    train_sft,
    usable,
)
from common.files import seed_of
from common.settings import Method, Rate, Stated, Whole
from dpo import Trajectory, action_count
from engine.experts import collect_experts
from engine.phases import Trained
from engine.run import Run
from environments import first_reply
from envs import Environment
from grpo import TaskGroup, clipped_loss, k2, leave_one_out, store_log_probs

PPO_EPOCHS = 2  # number of epochs over the trajectories of an iteration [ours]
PPO_BATCH = 16  # batch size in tasks; all rollouts of a task are in the same batch [ours]
PPO_CLIP = 0.2  # ratios are clipped to the range 1 - 0.2 to 1 + 0.2 [Schulman et al. 2017]
PPO_KL = 0.05   # weight of the KL divergence from the agent after SFT [ours]

# -------------------------------------------------------------------------------- RFT and DART


def rft(run: Run) -> None:
    """Trains an agent with RFT (Section 5.1), or with DART (Section 5.3).

    The agent after SFT plays the training tasks. Its successes are added to the expert
    trajectories, and the base model is fine-tuned on all of them. With --method dart, the agent
    plays more episodes of those tasks in which it often fails.
    """
    once = run.once
    experts, agent = train_on_experts(run)
    played = once("iter1/target.jsonl", explore, agent, experts, name="target", i=1)
    more = []
    if run.settings.method == "dart":
        more = once("iter1/target-more.jsonl", explore_more, agent, experts, played, name="target",
                    i=1)
    joined = once("iter1/experts.jsonl", join_successes, experts, played, more)
    agent = once("iter1/target-agent", train_sft, run.base, joined, name="target")
    evaluate_all(run, 1, target=agent)


def train_on_experts(run: Run) -> tuple[Trajectories, Model]:
    experts = run.once("experts.jsonl", collect_experts, run.expert_file)
    agent = run.once("sft-target", train_sft, run.base, experts, name="target")
    evaluate_all(run, 0, target=agent)
    return experts, agent


def explore_more(
    run: Run,
    model: Model,
    experts: Trajectories,
    played: Trajectories,
    name: str,
    i: int,
) -> tuple[Trajectories, dict]:
    """Samples additional rollouts for DART. A task gets more of these rollouts if more of its first
    rollouts failed. The indices of additional rollouts continue those of the first rollouts."""
    s = run.settings
    episodes = []
    for expert, rollouts in by_task(experts, played):
        task = expert.task
        first = len(rollouts)
        more = dart_rollouts([not t.is_failure for t in rollouts], s.dart_budget)
        for n in range(first, first + more):
            episodes.append(Trajectory(task, name, i, n, seed_of(s.seed, name, i, task, n)))
    trajectories = run.play(model, episodes, s.temperature)
    if not trajectories:
        return [], dict(episodes=0)
    return trajectories, summarise(trajectories, s.hard_threshold)


def dart_rollouts(successes: list[bool], budget: int) -> int:
    """Returns the number of additional rollouts of a task.

    Section 5.3 defines the difficulty of a task "based on the fraction of successful rollouts", and
    multiplies it by the budget N. We use round(N (1 - successes / n)), which is our reading of the
    text. `successes` contains one bool for each of the first n rollouts.
    """
    return round(budget * (1 - sum(successes) / len(successes)))


def join_successes(
    run: Run,
    experts: Trajectories,
    played: Trajectories,
    more: Trajectories,
) -> tuple[Trajectories, dict]:
    """Returns the expert trajectories, followed by the agent's successes.

    A success is not added if an expert trajectory or an earlier success of its task has the same
    actions, even if the thoughts differ.
    """
    added = []
    dropped = Counter()
    known = {task_and_actions(expert, run.env) for expert in experts}
    for expert, rollouts in by_task(experts, played + more):
        opening, _ = split_opening(expert)
        for t in rollouts:
            actions = task_and_actions(t, run.env)
            if not is_usable(t):
                dropped["too long"] += 1
            elif t.is_failure:
                dropped["failure"] += 1
            elif actions in known:
                dropped["known already"] += 1
            else:
                # With --protocol eto, the agent's prompt contains an example, but the prompt of
                # expert trajectories does not. SFT uses the prompt of the expert trajectory for
                # both.
                known.add(actions)
                added.append(replace(t, messages=opening + split_opening(t)[1]))
    return [*experts, *added], dict(experts=len(experts), successes=len(added), dropped=dropped)


def split_opening(t: Trajectory) -> tuple[list[dict], list[dict]]:
    """Returns the messages before the agent's first reply (the opening), and all later messages."""
    n = first_reply(t.messages, t.turns)
    return t.messages[:n], t.messages[n:]


def task_and_actions(t: Trajectory, env: Environment) -> tuple[str, ...]:
    """Returns the task and all actions of a trajectory, with normalised whitespace, to detect
    duplicates."""
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
    experts, after_sft = train_on_experts(run)
    agent = after_sft
    for i in range(1, run.settings.iterations + 1):
        played = run.once(f"iter{i}/target.jsonl", explore, agent, experts, name="target", i=i)
        agent = run.once(f"iter{i}/target-agent", train_ppo, agent, after_sft, experts, played,
                         name="target", i=i)
        evaluate_all(run, i, target=agent)


def train_ppo(
    run: Run,
    model: Model,
    after_sft: Model,
    experts: Trajectories,
    played: Trajectories,
    name: str,
    i: int,
) -> tuple[Trained | Model, dict]:
    """Trains an agent with PPO on its own trajectories of one iteration.

    The KL term keeps the policy close to the agent after SFT. The number `kl` estimates the KL
    divergence of the agent before this training from the agent after SFT, in nats per trajectory.
    """
    # 1. Group the rollouts by task.
    s = run.settings
    groups, unused = make_groups(usable(rollouts) for _, rollouts in by_task(experts, played))
    dropped = Counter(too_long(played) + unused)
    if not groups:
        run.print(f"{run.name}: the agent is left unchanged, because no two rollouts of a task can "
                  f"be compared ({dict(dropped)})")
        return model, dict(steps=0, dropped=dropped)

    # 2. Compute log pi_SFT and log pi_old. Here and in training, log-probabilities are computed
    # under the sampling distribution of the episodes, with its temperature and suppressed tokens.
    # Only one model is in memory at a time.
    sampler = run.encoder.sampler(s.temperature)
    log_probs = partial(run.log_probs, logits_processor=sampler.process_logits)
    store_log_probs(groups, "ref_log_probs", run.load(after_sft, groups), log_probs)
    policy = run.load(model, groups)
    store_log_probs(groups, "old_log_probs", policy, log_probs)
    kl = sum((group.old_log_probs - group.ref_log_probs).sum().item() for group in groups)

    # 3. Train for several epochs over the groups.
    rng = random.Random(seed_of(s.seed, "ppo", i))
    steps = dpo.batches(groups, PPO_BATCH, rng, PPO_EPOCHS)
    rates = dpo.learning_rates(len(steps), s.ppo_lr, DPO_WARMUP)
    loss = partial(clipped_loss, clip_low=PPO_CLIP, clip_high=PPO_CLIP, kl=PPO_KL, kl_term=k2)
    trained, numbers = run.fit(policy, steps, rates, loss, action_count, log_probs)
    return trained, dict(kl=kl / len(dpo.trajectories_of(groups)), dropped=dropped, **numbers)


def make_groups(rollouts: Iterable[Trajectories]) -> tuple[list[TaskGroup], list[str]]:
    """Returns a task group with advantages for each task that has at least two rollouts, and one
    reason for each unused rollout."""
    groups = []
    unused = []
    for trajectories in rollouts:
        if len(trajectories) == 1:
            unused.append("the only rollout of its task")
        elif trajectories:
            advantages = leave_one_out([t.reward for t in trajectories])
            groups.append(TaskGroup(trajectories, advantages=advantages))
    return groups, unused


# ------------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class Baselines(Stated):
    """DART and PPO"""
    # Budget N of DART: a task gets N x f additional rollouts, where f is the fraction of failures
    # among its first rollouts [Section 5.3]
    dart_budget: Whole = 10
    # Learning rate of PPO; it stays constant after a linear warmup, as in DPO [ours]
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
    "ppo": Method(ppo, (Common, "temperature", "rollouts", "iterations", "ppo_lr"),
                  "PPO on the agent's own episodes"),
}
