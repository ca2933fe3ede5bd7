"""What training did to each pair: margins.jsonl, for the page."""

from copy import copy

import torch

import coevolve
import dpo


@torch.no_grad()
def margins(run: coevolve.Run, model, groups: list[dpo.Group], objective: dpo.Objective) -> list:
    """Measures the pairs of a phase before and after it, the hardest tasks first.

    The loss that trained says what a margin is, so that its own numbers are taken, of one pair at a
    time.

    Args:
        run: The run, whose settings say how many tasks are measured.
        model: As it is after the phase.
        groups: What was trained on.
        objective: What was minimised.

    Returns:
        Rows {task, before, after} with [chosen, rejected, margin] of each pair, in nats. There are
        none for a loss that states no margins, or where pi_ref is not the model before the phase.
    """
    groups = [group for group in groups if group.pairs]
    if not groups or run.settings.reference != "phase":
        return []
    groups.sort(key=hardest_failure, reverse=True)
    rows = []
    for some in dpo.micro_batches(groups[:run.settings.margins], run.tokens_per_forward):
        per_token = run.log_probs(model, dpo.trajectories_of(some))               # (A,)
        counts = [sum(t.action_count for t in group.trajectories) for group in some]
        for group, policy in zip(some, per_token.split(counts)):
            row = margins_of_task(policy, group, objective)
            if row is None:
                return []
            rows.append(row)
    return rows


def hardest_failure(group: dpo.Group) -> float:
    return max(group.trajectories[pair.rejected].reward for pair in group.pairs)


def margins_of_task(policy: torch.Tensor, group: dpo.Group,
                    objective: dpo.Objective) -> dict | None:
    """The row of a task; None where the loss states no margin. policy: of its action tokens."""
    before, after = [], []
    reference = group.reference or [0.0] * len(group.trajectories)
    for pair in group.pairs:
        alone = copy(group)  # with whatever a fork's objective has put on it
        alone.pairs = [pair]
        _, statistics = objective.loss(policy, [alone])
        found = statistics.get(pair.kind, {})
        if not {"chosen", "rejected", "margin"} <= found.keys():
            return None
        before.append(rounded(reference[pair.chosen], reference[pair.rejected], 0.0))
        after.append(rounded(found["chosen"], found["rejected"], found["margin"]))
    return dict(task=group.trajectories[0].task, before=before, after=after)


def rounded(chosen: float, rejected: float, margin: float) -> list[float]:
    return [round(chosen, 3), round(rejected, 3), round(margin, 4)]
