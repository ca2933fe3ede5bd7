"""The paper's baselines outside the method's loop: RFT, RFT + DART, and PPO on whole episodes.

A method is a loop over phases, the settings that it reads, and a line in METHODS. `rft` is the
shortest: phases of the core, and two of its own.
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
    evaluations,
    explore,
    given_experts,
    outcomes,
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
from evolve import Visit, advantage_of_tokens, note_log_probs

PPO_EPOCHS = 2  # over the episodes of an iteration [ours]
PPO_BATCH = 16  # tasks of one step, with all their rollouts [ours]
PPO_CLIP = 0.2  # a ratio is clipped to 1 plus or minus this [Schulman et al. 2017]
PPO_KL = 0.05  # weight of the KL divergence from the agent after SFT [ours]

# -------------------------------------------------------------------------------- RFT and DART


def rft(run: Run) -> None:
    """RFT: the agent's own successes join the experts, and the base model is fine-tuned once more
    (Section 5.1). With --method dart, DART samples more where successes are rare (Section 5.3)."""
    once = run.once
    experts, agent = begin(run)
    played = [once("iter1/target.jsonl", explore, agent, experts, name="target", i=1)]
    if run.settings.method == "dart":
        played.append(once("iter1/target-more.jsonl", explore_more, agent, *played, name="target",
                           i=1))
    joined = once("iter1/experts.jsonl", join_successes, experts, played)
    agent = once("iter1/target-agent", train_sft, run.base, joined, name="target")
    evaluations(run, {"target": agent}, 1)


def begin(run: Run) -> tuple[Path, Path]:
    """The experts and the agent after SFT, as in the core's loop."""
    experts = run.once("experts.jsonl", collect_experts, *given_experts(run.settings))
    agent = run.once("sft-target", train_sft, run.base, experts, name="target")
    evaluations(run, {"target": agent}, 0)
    return experts, agent


def explore_more(run: Run, out: Path, agent: Path, played: Path, name: str, i: int) -> dict:
    """DART: lets an agent play tasks again, the more often the more of its rollouts failed."""
    s = run.settings
    won = defaultdict(list)  # task -> whether each of its rollouts succeeded
    for t in read(played):
        won[t.task].append(not t.is_failure)

    begun = []
    for task, successes in won.items():
        first = len(successes)
        for n in range(first, first + dart_rollouts(successes, s.dart_budget)):
            begun.append(Trajectory(task, name, i, n, seed_of(s.seed, name, i, task, n)))
    episodes = run.play(agent, begun, s.temperature)
    write(run, out, episodes)
    return outcomes(episodes, s.hard_threshold) if episodes else dict(episodes=0)


def dart_rollouts(won: list[bool], budget: int) -> int:
    """How many more rollouts a task gets. Section 5.3: rollouts estimate the difficulty "based on
    the fraction of successful rollouts", which is multiplied by the budget N. So we read:
    N (1 - successes / n), rounded."""
    return round(budget * (1 - sum(won) / len(won)))


def join_successes(run: Run, out: Path, experts: Path, played: list[Path]) -> dict:
    """Writes the experts and the sampled successes."""
    dropped = Counter()
    known = read(experts)
    joined = join(known, by_task(usable(read(*played), dropped)), dropped, run.env)
    write(run, out, joined)
    return dict(experts=len(known), successes=len(joined) - len(known), dropped=dropped)


def join(experts: list[Trajectory], sampled: dict[str, list[Trajectory]], dropped: Counter,
         env: Environment) -> list[Trajectory]:
    """Adds new successes to the experts.

    Args:
        experts: The experts.
        sampled: task -> trajectories.
        dropped: Gets, by reason, how many do not join.
        env: The environment.

    Returns:
        The experts, then the successes. Of those with equal actions, whatever the thoughts before
        them, the first is kept, the expert before all.
    """
    joined = list(experts)
    known = {actions(expert, env) for expert in experts}
    openings = {expert.task: parts_of(expert)[0] for expert in experts}
    for trajectories in sampled.values():
        for t in trajectories:
            if t.is_failure:
                dropped["failure"] += 1
            elif actions(t, env) in known:
                dropped["known already"] += 1
            else:  # by ETO's protocol without the example that it was shown
                known.add(actions(t, env))
                joined.append(replace(t, messages=openings[t.task] + parts_of(t)[1]))
    return joined


def parts_of(t: Trajectory) -> tuple[list[dict], list[dict]]:
    """The turns that a trajectory opens with, and the rest."""
    n = first_reply(t.messages, t.steps)
    return t.messages[:n], t.messages[n:]


def actions(t: Trajectory, env: Environment) -> tuple[str, ...]:
    """A trajectory's task and actions."""
    found = [t.task]
    for turn in parts_of(t)[1]:
        if turn["role"] == "assistant":
            action = env.action(turn["content"]) or ""
            found.append(" ".join(action.split()))
    return tuple(found)


# ----------------------------------------------------------------------------------------- PPO


def ppo(run: Run) -> None:
    """PPO, which "directly optimizes the SFT policy" for the reward (Section 5.1). The paper says
    no more. Here the reward comes at the end of an episode, all its action tokens share one
    advantage, and there is no value network."""
    s = run.settings
    experts, first = begin(run)
    agent = first
    for i in range(1, s.iterations + 1):
        played = run.once(f"iter{i}/target.jsonl", explore, agent, experts, name="target", i=i)
        agent = run.once(f"iter{i}/target-agent", train_ppo, agent, first, played, name="target",
                         i=i)
        evaluations(run, {"target": agent}, i)


def train_ppo(run: Run, out: Path, agent: Path, first: Path, played: Path, name: str,
              i: int) -> dict:
    """Trains an agent by PPO on its own episodes of this iteration.

    Args:
        run: The run.
        out: The folder of the trained agent.
        agent: The agent that played.
        first: The agent after SFT, from which it is kept near.
        played: Its episodes.
        name: What the agent is called.
        i: The iteration.

    Returns:
        The KL from `first` before the phase, and what `Run.fit` returns.
    """
    s = run.settings
    dropped = Counter()
    visits = with_advantages(by_task(usable(read(played), dropped)), dropped)
    if not visits:
        run.say(f"{run.name}: no two rollouts of a task to compare, since {dict(dropped)}; the "
                "agent stays as it is")
        return run.keep(agent, out) | dict(dropped=dropped)

    # pi is the distribution that episodes were sampled from, in all passes.
    log_probs = partial(run.log_probs, scores=run.encoder.sampler(s.temperature).scores)
    note_log_probs(visits, "ref", run.load(first), log_probs)  # one model is in memory at a time
    model = run.load(agent)
    note_log_probs(visits, "old", model, log_probs)
    kl = sum((visit.old - visit.ref).sum().item() for visit in visits)

    rng = random.Random(seed_of(s.seed, "ppo", i))
    steps = dpo.batches(visits, PPO_BATCH, rng, PPO_EPOCHS)
    rates = dpo.learning_rates(len(steps), s.ppo_lr, s.dpo_warmup)
    loss = partial(ppo_loss, clip=PPO_CLIP, kl=PPO_KL)
    numbers = run.fit(model, out, steps, rates, loss, action_count, log_probs)
    return dict(kl=kl / len(dpo.trajectories_of(visits)), dropped=dropped, **numbers)


def with_advantages(rollouts: dict[str, list[Trajectory]], dropped: Counter) -> list[Visit]:
    """Trajectories by task, as groups; counts those without another beside them."""
    visits = []
    for trajectories in rollouts.values():
        if len(trajectories) == 1:
            dropped["the only rollout of its task"] += 1
        else:
            advantages = leave_one_out([t.reward for t in trajectories])
            visits.append(Visit(trajectories, advantages=advantages))
    return visits


def leave_one_out(rewards: list[float]) -> list[float]:
    """Each reward minus the mean of the others, of two at least: an unbiased baseline (Kool et al.
    2019; Ahmadian et al. 2024)."""
    total = sum(rewards)
    n = len(rewards)
    return [reward - (total - reward) / (n - 1) for reward in rewards]


def ppo_loss(policy: Tensor, visits: list[Visit], clip: float, kl: float) -> tuple[Tensor, dict]:
    """PPO's clipped objective (Schulman et al. 2017) and a KL term, summed over action tokens t_k:

        L = sum_k  -min(rho_k A, clip(rho_k, 1 - clip, 1 + clip) A) + kl/2 (log pi/pi_SFT)^2

    rho_k = pi(t_k|.) / pi_old(t_k|.), and A is the advantage of the episode. On a policy's own
    samples the squared term has the gradient of the tokens' KL(pi || pi_SFT).
    """
    old = torch.cat([visit.old for visit in visits]).to(policy)                   # (A,)
    sft = torch.cat([visit.ref for visit in visits]).to(policy)                   # (A,)
    advantage = policy.new_tensor(advantage_of_tokens(visits))                    # (A,)
    ratio = (policy - old).exp()                                                  # (A,)
    clipped = ratio.clamp(1 - clip, 1 + clip)
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)
    return (kl * (policy - sft) ** 2 / 2 - surrogate).sum(), {}


# ------------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class Baselines(Stated):
    """DART and PPO"""
    # DART's N: a task gets N times its share of failures more rollouts [Section 5.3]
    dart_budget: Whole = 10
    # The learning rate of PPO, constant after --dpo-warmup [ours]
    ppo_lr: Rate = 1e-6

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        return [*super().conflicts(s),
                (s.method == "ppo" and s.rollouts < 2, f"--rollouts {s.rollouts}",
                 "PPO compares the rollouts of a task; give 2 at least")]


METHODS = {
    "rft": Method(rft, (Common, "temperature", "rollouts"),
                  "SFT once more, with the agent's own successes"),
    "dart": Method(rft, (Common, "temperature", "rollouts", "dart_budget"),
                   "RFT with more rollouts where successes are rare"),
    "ppo": Method(ppo, (Common, "temperature", "rollouts", "iterations", "dpo_warmup", "ppo_lr"),
                  "PPO on the agent's own episodes"),
}
