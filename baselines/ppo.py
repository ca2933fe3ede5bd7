"""PPO on whole episodes, a baseline of the paper.

The paper says only that PPO "directly optimizes the SFT policy" for the reward (Section 5.1). Here:
the reward comes at the end of an episode, all its action tokens share one advantage, and there is
no value network. The baseline is leave-one-out: an episode is compared with the mean reward of the
other rollouts of its instruction (Kool et al. 2019; Ahmadian et al. 2024), which is unbiased.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

import dpo
from engine import ranks
from harness.play import usable_rollouts
from harness.run import Run


def train(run: Run, out: Path, i: int) -> dict:
    """The target after PPO on its own episodes of this iteration."""
    s, before, dropped = run.settings, run.agent("target", i - 1), Counter()
    found = groups(usable_rollouts(run, [f"iter{i}/target.jsonl"], dropped), dropped)
    if not found:
        run.log("ppo", iteration=i, episodes=0, kl=0.0, dropped=dropped)
        return run.keep_agent(before, out, f"iter{i}: no two rollouts of a task to compare for the "
                                           "target")
    never = run.never_drawn()  # log pi is of what was sampled from
    for policy, name in ((run.agent("target", 0), "ref"), (before, "old")):
        model = None  # one at a time in memory
        model = run.load(policy)  # the same arithmetic as in training
        with run.bar(f"log-probabilities: {name}", sum(g.tokens for g in found), "token") as bar:
            add_log_probs(run.accelerator, model, found, name, s.temperature, never,
                          s.tokens_per_forward, bar)
    run.log("ppo", iteration=i, episodes=sum(len(g.sequences) for g in found), kl=kl_of(found),
            dropped=dropped)
    rng = run.rng("ppo", i)
    epochs = [dpo.batches(found, s.ppo_batch, "instructions", rng) for _ in range(s.ppo_epochs)]
    return run.fit(model, before, out, epochs,
                   partial(objective, temperature=s.temperature, never=never, clip=s.ppo_clip,
                           kl=s.ppo_kl),
                   dpo.count_action_tokens, lr=s.ppo_lr, warmup=s.dpo_warmup, schedule="constant")


@dataclass
class Rollouts(dpo.Group):
    """One instruction's episodes: `sequences`, and what follows for each of them."""

    advantages: list[float] = field(default_factory=list)
    old: list[torch.Tensor] = field(default_factory=list)  # (a,) log pi of its action tokens when
    ref: list[torch.Tensor] = field(default_factory=list)  # it was sampled, and at the start; nats


def groups(rollouts: dict[str, list[dpo.Trajectory]], dropped: Counter) -> list[Rollouts]:
    """Trajectories by task as groups with advantages; counts those without another beside them."""
    found = []
    for task, rows in rollouts.items():
        if len(rows) < 2:
            dropped["the only rollout of its instruction"] += len(rows)
            continue
        found.append(Rollouts(task, rows, advantages=leave_one_out([t.reward for t in rows])))
    return found


def leave_one_out(rewards: list[float]) -> list[float]:
    """Each reward minus the mean of the others; two rewards at least."""
    total, n = sum(rewards), len(rewards)
    return [r - (total - r) / (n - 1) for r in rewards]


def add_log_probs(accelerator, model, groups: list[Rollouts], name: str, temperature: float,
                  never: list[int], tokens_per_forward: int, progress=None) -> None:
    """Sets the field `name` (old or ref) of every group by `model`, as `dpo.add_reference` does."""
    def read(model, sequences):
        return dpo.token_log_probs(model, sequences, temperature, never).cpu().split(
            [s.action_tokens for s in sequences])

    found = ranks.over_sequences(accelerator, model, groups, tokens_per_forward, read, progress)
    for g, log_probs in zip(groups, found):
        setattr(g, name, log_probs)


def kl_of(groups: list[Rollouts]) -> float:
    """The sampling policy's divergence from the SFT policy, in nats per episode, as sampled."""
    episodes = [(old - ref).sum().item() for g in groups for old, ref in zip(g.old, g.ref)]
    return sum(episodes) / max(len(episodes), 1)


def objective(model, groups: list[Rollouts], temperature: float, never: list[int], clip: float,
              kl: float):
    """PPO's clipped objective and the KL term, summed over all action tokens; no statistics.

        L = sum_k  -min(rho_k A, clip(rho_k, 1 - clip, 1 + clip) A) + kl/2 (log pi/pi_SFT)^2
        rho_k = pi(t_k | t_<k) / pi_old(t_k | t_<k)

    On a policy's own samples the squared term has the gradient of the tokens' KL(pi || pi_SFT),
    each after a given beginning: what an early token does to later divergences is left out [ours].
    """
    new, old, sft, advantage = of_tokens(model, groups, temperature, never)                  # (A,)
    ratio = (new - old).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return (kl * (new - sft) ** 2 / 2 - surrogate).sum(), {}


def of_tokens(model, groups: list[Rollouts], temperature: float, never: list[int]):
    """log pi, log pi_old, log pi_ref and the advantage of every action token, each (A,)."""
    sequences = [s for g in groups for s in g.sequences]
    new = dpo.token_log_probs(model, sequences, temperature, never)
    old, ref = (torch.cat([x for g in groups for x in getattr(g, name)]).to(new)
                for name in ("old", "ref"))
    tokens = torch.tensor([s.action_tokens for s in sequences], device=new.device)
    advantage = new.new_tensor([a for g in groups for a in g.advantages]).repeat_interleave(tokens)
    return new, old, ref, advantage
