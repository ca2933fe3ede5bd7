"""The numbers of an exploration and of an evaluation."""

import numpy as np

from lab.harness.files import mean
from lab.play_env import SUCCESS


def bootstrap_interval(values) -> tuple[float, float]:
    """(low, high): 95% percentile bootstrap interval of the mean of `values`, one per task."""
    values = np.asarray(values, dtype=float)  # (N,)
    drawn = np.random.default_rng(0).integers(values.size, size=(1000, values.size))
    low, high = np.percentile(values[drawn].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def played(trajectories) -> dict:
    """How many episodes, and tokens in them."""
    return dict(episodes=len(trajectories), tokens=sum(len(t.ids) for t in trajectories))


def scores(rows, tasks) -> dict:
    """The numbers of an evaluation: `rows` are the trajectories of `tasks` that were not lost.
    Lost, cut and overlong episodes are counted where there are any."""
    rewards = [row.reward for row in rows]
    low, high = bootstrap_interval(rewards)
    counts = dict(lost=len(tasks) - len(rows),
                  out_of_context=sum(r.ended == "context" for r in rows),
                  with_cut_replies=sum(r.cut_replies > 0 for r in rows))
    return dict(reward=mean(rewards), reward_low=low, reward_high=high,
                success=mean(r >= SUCCESS for r in rewards), steps=mean(r.steps for r in rows),
                **{name: n for name, n in counts.items() if n})


def table2(rows, hard_threshold: float) -> dict:
    """The paper's Table 2: shares of explored trajectories, together 1, and their mean reward."""
    hard = mean(hard_threshold <= r.reward < SUCCESS for r in rows)
    won = mean(r.reward >= SUCCESS for r in rows)
    return dict(success=won, negative=1 - won - hard if rows else 0.0, hard_negative=hard,
                reward=mean(r.reward for r in rows))
