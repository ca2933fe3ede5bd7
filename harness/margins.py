"""What training did to each pair: log-probabilities and margins before and after it, in the log.

For that the trajectories go through the model once more, which is a tenth of three epochs on them.
--margins bounds it to the instructions with the hardest negatives.
"""

from dataclasses import replace

from dpo import Group
from harness.settings import Settings


def watched(epochs: list[list[list[Group]]], most: int) -> list[Group]:
    """The groups with the highest rejected rewards, `most` of those that have pairs; copies."""
    groups = {g.task: g for epoch in epochs for batch in epoch for g in batch if g.pairs}
    hardest = sorted(groups.values(), reverse=True, key=lambda g: max(
        g.sequences[p.rejected].reward for p in g.pairs))
    return [replace(g) for g in hardest[:most]]


def of_pairs(groups: list[Group], policy: list[list[float]], beta: float, s: Settings) -> dict:
    """task -> [chosen and rejected log-probability, margin] of its pairs, as in pairs-*.jsonl.

    policy: log pi(e|u) of the groups' trajectories, in nats. The margin is that of Eq. (7).
    """
    found = {}
    for g, log_probs in zip(groups, policy):
        length = [t.action_tokens if s.log_prob == "mean" else 1 for t in g.sequences]
        reward = [beta * (pi - ref) / n for pi, ref, n in zip(log_probs, g.reference, length)]
        found[g.task] = [[round(log_probs[p.chosen], 3), round(log_probs[p.rejected], 3),
                          round(reward[p.chosen] - reward[p.rejected], 4)] for p in g.pairs]
    return found
