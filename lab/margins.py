"""What training did to each pair: log-probabilities and margins before and after it.

For that the trajectories go through the model once more, which is a tenth of three epochs on them.
--margins bounds it to the instructions with the hardest negatives.
"""

import torch

import dpo


@torch.no_grad()
def of(run, model, steps: list[list[dpo.Group]], how: dpo.Objective) -> list[dict]:
    """Rows {task, before, after} with [chosen, rejected, margin] of each pair, in nats; of a phase
    without preferences, or one with another reference than its start, none."""
    groups = [*{id(g): g for batch in steps for g in batch if g.pairs}.values()]
    if not groups or run.settings.reference != "phase":
        return []
    s = how.loss.keywords["s"]
    groups.sort(reverse=True, key=lambda g: max(g.sequences[p.rejected].reward for p in g.pairs))
    rows = []
    for some in dpo.together(groups[:run.settings.margins], how.tokens):
        policy = run.log_probs(model, dpo.trajectories(some))
        pi, ref, _, w, l = dpo.of_pairs(policy, some, s.log_prob)
        margin = s.beta * ((pi - ref)[w] - (pi - ref)[l])                             # (P,)
        sides = ([*zip(p[w].tolist(), p[l].tolist(), m.tolist())] for p, m in (
            (ref, torch.zeros_like(margin)), (pi, margin)))
        before, after = ([[round(w, 3), round(l, 3), round(m, 4)] for w, l, m in side]
                         for side in sides)
        for g in some:
            n = len(g.pairs)
            rows.append(dict(task=g.sequences[0].task, before=before[:n], after=after[:n]))
            before, after = before[n:], after[n:]
    return rows
