"""PPO on whole episodes, a baseline of the paper.

The paper says only that PPO "directly optimizes the SFT policy" for the reward (Section 5.1). Here:
the reward comes at the end of an episode, all its action tokens share one advantage, and there is
no value network. The baseline is leave-one-out: an episode is compared with the mean reward of the
other rollouts of its instruction (Kool et al. 2019; Ahmadian et al. 2024), which is unbiased.
"""

from collections import Counter
from functools import partial
from pathlib import Path

from lab import tokens as dpo
from lab.playing.episodes import usable_rollouts
from lab.program.run import Run


def train(run: Run, out: Path, i: int) -> dict:
    """The target after PPO on its own episodes of this iteration."""
    s, before, dropped = run.settings, run.agent_folder("target", i - 1), Counter()
    groups = groups_of(usable_rollouts(run, [f"iter{i}/target.jsonl"], dropped), dropped)
    if not groups:
        run.log("ppo", iteration=i, episodes=0, kl=0.0, dropped=dropped)
        run.log.say(f"iter{i}: no two rollouts of a task to compare for the target, which stays "
                    "as it is")
        run.trainer.copy(before, out)
        return dict(steps=0)
    sampler = run.trainer.sampler(s.temperature)
    for policy, name in ((run.agent_folder("target", 0), "ref"), (before, "old")):
        model = None  # one at a time in memory
        model = run.trainer.load(policy)  # the same arithmetic as in training
        for g, log_probs in zip(groups, run.trainer.log_probs(model, groups, sampler)):
            setattr(g, name, log_probs)
    run.log("ppo", iteration=i, episodes=sum(len(g.sequences) for g in groups),
            kl=dpo.kl_of(groups), dropped=dropped)
    rng = run.rng("ppo", i)
    epochs = [dpo.batches(groups, s.ppo_batch, "instructions", rng) for _ in range(s.ppo_epochs)]
    loss = partial(ppo_loss, sampler=sampler, clip=s.ppo_clip, kl=s.ppo_kl)
    return run.trainer.fit(model, before, out, epochs,
                           dpo.Objective(loss, dpo.count_action_tokens),
                           run.trainer.optimisation(s.ppo_lr, s.dpo_warmup))


def groups_of(rollouts: dict[str, list[dpo.Trajectory]], dropped: Counter) -> list[dpo.Rollouts]:
    """Trajectories by task as groups with advantages; counts those without another beside them."""
    groups = []
    for task, rows in rollouts.items():
        if len(rows) < 2:
            dropped["the only rollout of its instruction"] += len(rows)
            continue
        groups.append(dpo.Rollouts(task, rows, advantages=leave_one_out([t.reward for t in rows])))
    return groups


def leave_one_out(rewards: list[float]) -> list[float]:
    """Each reward minus the mean of the others; two rewards at least."""
    total, n = sum(rewards), len(rewards)
    return [r - (total - r) / (n - 1) for r in rewards]


def ppo_loss(model, groups: list[dpo.Rollouts], sampler: dpo.Sampler, clip: float, kl: float):
    """PPO's clipped objective and the KL term, summed over all action tokens; no statistics.

        L = sum_k  -min(rho_k A, clip(rho_k, 1 - clip, 1 + clip) A) + kl/2 (log pi/pi_SFT)^2

    On a policy's own samples the squared term has the gradient of the tokens' KL(pi || pi_SFT).
    """
    surrogate, _, new, sft = dpo.clipped_surrogate(model, groups, sampler, clip, clip)       # (A,)
    return (kl * (new - sft) ** 2 / 2 - surrogate).sum(), {}
