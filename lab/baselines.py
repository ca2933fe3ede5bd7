"""The paper's baselines outside the method's loop: RFT, RFT + DART, and PPO on whole episodes.

A method is a loop over phases, the settings that it reads, and a line in METHODS. `rft` is the
shortest: phases of the core, and two of its own.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import coevolve
import dpo
from coevolve import Common, Run, by_task, evaluations, read, scores, train_sft, write
from common.files import seed_of
from common.settings import Count, Method, Rate, Stated, Weight, Whole, limited
from dpo import Sampler, Trajectory
from evolve import Visit
from worlds import World, first_reply

# -------------------------------------------------------------------------------- RFT and DART


def rft(run: Run) -> None:
    """RFT: the agent's own successes join the experts, and the base model is fine-tuned once more
    (Section 5.1). With --method dart, DART samples more where successes are rare (Section 5.3)."""
    s, once, (experts, agent) = run.settings, run.once, begin(run)
    played = [once("iter1/target.jsonl", explore, agent, experts, name="target", i=1,
                   rollouts=s.samples)]
    if s.method == "dart":
        played.append(once("iter1/target-more.jsonl", explore, agent, experts, *played,
                           name="target", i=1, rollouts=s.samples))
    joined = once("iter1/experts.jsonl", join_successes, experts, played)
    agent = once("iter1/target-agent", train_again, run.base, joined, name="target", i=1)
    evaluations(run, {"target": agent}, 1)


def begin(run: Run) -> tuple[Path, Path]:
    """The experts and the agent after SFT, as in the core's loop."""
    experts = run.once("experts.jsonl", coevolve.collect_experts,
                       *map(Path, filter(None, [run.settings.experts])))
    agent = run.once("sft-target", train_sft, run.base, experts, name="target")
    evaluations(run, {"target": agent}, 0)
    return experts, agent


def explore(run: Run, out: Path, agent: Path, experts: Path, *first: Path, name: str, i: int,
            rollouts: int) -> dict:
    """Sampled episodes of an agent, so many rollouts of every expert's task; after the `first` ones
    DART's, more of them where these failed."""
    s, won = run.settings, defaultdict(list)
    for t in read(*first):
        won[t.task].append(t.reward >= run.env.success)

    episodes = []
    for e in read(experts):
        more = dart_rollouts(won[e.task], s.dart_budget) if first else 0
        episodes += [Trajectory(e.task, name, i, n, seed_of(s.seed, name, i, e.task, n))
                     for n in (range(rollouts, rollouts + more) if first else range(rollouts))]
    episodes = run.play(agent, episodes, s.temperature)
    write(run, out, episodes)
    return scores(episodes, run) if episodes else dict(episodes=0)


def dart_rollouts(won: list[bool], budget: int) -> int:
    """How many more rollouts an instruction gets. Section 5.3: rollouts estimate the difficulty
    "based on the fraction of successful rollouts", which is multiplied by the budget N. So we read:
    N (1 - successes / n), rounded."""
    return round(budget * (1 - sum(won) / len(won)))


def join_successes(run: Run, out: Path, experts: Path, played: list[Path]) -> dict:
    """The experts and the sampled successes."""
    dropped, known = Counter(), read(experts)
    joined = join(known, by_task(read(*played), dropped), dropped, run.env)
    write(run, out, joined)
    return dict(experts=len(known), successes=len(joined) - len(known), dropped=dropped)


def join(experts: list[Trajectory], sampled: dict[str, list[Trajectory]], dropped: Counter,
         env: World) -> list[Trajectory]:
    """`experts` followed by the new successes in `sampled`, task -> trajectories. Of those with
    equal actions, whatever the thoughts before them, the first is kept, the expert before all."""
    def parts(t):
        """What the trajectory opens with, and the rest."""
        n = first_reply(t.messages, t.steps)
        return t.messages[:n], t.messages[n:]

    def actions(t):
        return t.task, *(" ".join((env.action(m["content"]) or "").split())
                         for m in parts(t)[1] if m["role"] == "assistant")

    joined, known = list(experts), {actions(e) for e in experts}
    openings = {e.task: parts(e)[0] for e in experts}
    for t in itertools.chain.from_iterable(sampled.values()):
        if t.reward < env.success:
            dropped["failure"] += 1
        elif actions(t) in known:
            dropped["known already"] += 1
        else:  # by ETO's protocol without the example that it was shown
            known.add(actions(t))
            joined.append(replace(t, messages=openings[t.task] + parts(t)[1]))
    return joined


def train_again(run: Run, out: Path, base: Path, experts: Path, name: str, i: int) -> dict:
    """`train_sft` with batches in another order."""
    return train_sft(run, out, base, experts, name=f"{name}/{i}")


# ----------------------------------------------------------------------------------------- PPO


def ppo(run: Run) -> None:
    """PPO, which "directly optimizes the SFT policy" for the reward (Section 5.1). The paper says
    no more. Here the reward comes at the end of an episode, all its action tokens share one
    advantage, and there is no value network."""
    s, once, (experts, first) = run.settings, run.once, begin(run)
    agent = first
    for i in range(1, s.iterations + 1):
        played = once(f"iter{i}/target.jsonl", explore, agent, experts, name="target", i=i,
                      rollouts=s.ppo_rollouts)
        agent = once(f"iter{i}/target-agent", train_ppo, agent, first, played, name="target", i=i)
        evaluations(run, {"target": agent}, i)


def train_ppo(run: Run, out: Path, agent: Path, first: Path, played: Path, name: str,
              i: int) -> dict:
    """The agent after PPO on its own episodes of this iteration. first: the agent after SFT."""
    s, dropped, rng = run.settings, Counter(), random.Random(seed_of(run.settings.seed, "ppo", i))
    groups = with_advantages(by_task(read(played), dropped), dropped)
    if not groups:
        if run.main:
            print(f"{run.name}: no two rollouts of an instruction to compare, since "
                  f"{dict(dropped)}; the agent stays as it is")
            shutil.copytree(agent, out)
        return dict(steps=0, dropped=dropped)
    words = dpo.read_config(agent).get_text_config().vocab_size
    sampler = Sampler(s.temperature, run.encoder.never(words))
    for policy, name in ((first, "ref"), (agent, "old")):
        model = None  # one at a time in memory
        model = run.load(policy)  # which computes as in training, not as when it sampled
        with torch.no_grad():
            values = run.log_probs(model, dpo.trajectories(groups), sampler).cpu()
        for g, part in zip(groups, values.split([g.action_tokens for g in groups])):
            setattr(g, name, part)
    kl = sum((g.old - g.ref).sum().item() for g in groups) / len(dpo.trajectories(groups))
    steps = [batch for _ in range(s.ppo_epochs)
             for batch in dpo.batches(groups, s.ppo_batch, "instructions", rng)]
    return dict(kl=kl, dropped=dropped, **run.fit(model, out, steps, dpo.Objective(
        partial(ppo_loss, clip=s.ppo_clip, kl=s.ppo_kl), lambda g: g.action_tokens,
        s.ppo_lr, s.dpo_warmup, sampler=sampler)))


def with_advantages(rollouts: dict[str, list[Trajectory]], dropped: Counter) -> list[Visit]:
    """Trajectories by task as groups; counts those without another beside them."""
    if alone := sum(len(rows) == 1 for rows in rollouts.values()):
        dropped["the only rollout of its instruction"] += alone
    return [Visit(rows, advantages=leave_one_out([t.reward for t in rows]))
            for rows in rollouts.values() if len(rows) > 1]


def leave_one_out(rewards: list[float]) -> list[float]:
    """Each reward minus the mean of the others, of two at least: an unbiased baseline (Kool et al.
    2019; Ahmadian et al. 2024)."""
    total, n = sum(rewards), len(rewards)
    return [r - (total - r) / (n - 1) for r in rewards]


def ppo_loss(policy: Tensor, groups: list[Visit], clip: float, kl: float) -> tuple[Tensor, dict]:
    """PPO's clipped objective (Schulman et al. 2017) and a KL term, summed over action tokens t_k:

        L = sum_k  -min(rho_k A, clip(rho_k, 1 - clip, 1 + clip) A) + kl/2 (log pi/pi_SFT)^2

    rho_k = pi(t_k|.) / pi_old(t_k|.), and A is the advantage of the episode. On a policy's own
    samples the squared term has the gradient of the tokens' KL(pi || pi_SFT).
    """
    old, sft = (torch.cat(values).to(policy) for values in
                ([g.old for g in groups], [g.ref for g in groups]))               # (A,)
    advantage = policy.new_tensor([a for g in groups for t, a in zip(g.sequences, g.advantages)
                                   for _ in range(t.action_tokens)])              # (A,)
    ratio = (policy - old).exp()                                                  # (A,)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return (kl * (policy - sft) ** 2 / 2 - surrogate).sum(), {}


# ------------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class Ppo:
    # per instruction and iteration [ours]
    ppo_rollouts: limited(int, "must be at least 2", lambda n: n >= 2) = 4
    ppo_epochs: Count = 2    # passes over the episodes of an iteration [ours]
    ppo_batch: Count = 16    # instructions per step, with all their rollouts [ours]
    ppo_lr: Rate = 1e-6      # constant after dpo_warmup [ours]
    ppo_clip: Rate = 0.2     # a ratio is clipped to 1 +- this [Schulman et al. 2017]
    ppo_kl: Weight = 0.05    # of the KL from the agent after SFT [ours]


@dataclass(frozen=True)
class Baselines(Ppo, Stated):
    samples: Count = 5       # rollouts of an instruction, DART's n [Section 5.3; ours]
    dart_budget: Whole = 10  # N; N x (share of failures) more rollouts [Section 5.3]

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        return [*super().conflicts(s),
                (s.method in METHODS and s.temperature == 0, "--temperature 0",
                 "all rollouts of an instruction would be the same; raise it")]


METHODS = {
    "rft": Method(rft, (Common, "temperature", "samples"),
                  "SFT, then SFT on its own successes beside the experts"),
    "dart": Method(rft, (Common, "temperature", "samples", "dart_budget"),
                   "rft, with more samples of harder tasks"),
    "ppo": Method(ppo, (Common, Ppo, "temperature", "iterations", "dpo_warmup"),
                  "SFT, then PPO on rewards alone"),
}
