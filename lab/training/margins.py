"""What training did to each pair: log-probabilities and margins before and after it, in the log.

For that the trajectories go through the model once more, which is a tenth of three epochs on them.
--margins bounds it to the instructions with the hardest negatives.
"""

from dataclasses import replace

import torch

from lab.tokens import Group, pair_losses


def hardest(groups: list[Group], most: int) -> list[Group]:
    """The groups with the highest rejected rewards, `most` of them; copies."""
    ranked = sorted(groups, reverse=True, key=lambda g: max(
        g.sequences[p.rejected].reward for p in g.pairs))
    return [replace(g) for g in ranked[:most]]


def of_pairs(groups: list[Group], policy: list[list[float]], beta: float, log_prob: str) -> dict:
    """task -> [chosen and rejected log-probability, margin] of its pairs, as in pairs-*.jsonl.

    policy: log pi(e|u) of the groups' trajectories, in nats. The margin is that of the loss.
    """
    log_probs = torch.tensor([x for xs in policy for x in xs], dtype=torch.float64)       # (T,)
    _, margin, chosen, rejected = pair_losses(log_probs, groups, beta, log_prob)          # (P,)
    rows = iter(zip(log_probs[chosen].tolist(), log_probs[rejected].tolist(), margin.tolist()))
    return {g.task: [[round(w, 3), round(l, 3), round(m, 4)]
                     for _, (w, l, m) in zip(g.pairs, rows)] for g in groups}
