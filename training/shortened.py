"""Rejected trajectories without a part, which the loss leaves out: --cut-turns, --rejected-ends."""

from dataclasses import replace

from dpo import Trajectory


def cut(t: Trajectory, turns: int | None) -> Trajectory:
    """The trajectory up to the end of its turn number `turns` (None: whole)."""
    ends = ends_of_turns(t)
    if turns is None or turns >= len(ends):
        return t
    end = ends[turns - 1] + 1
    return replace(t, ids=t.ids[:end], action_mask=t.action_mask[:end], ended="budget")


def ends_of_turns(t: Trajectory) -> list[int]:
    """Where the last token of each reply stands."""
    mask = [*t.action_mask, 0]
    return [k for k in range(len(t.ids)) if mask[k] and not mask[k + 1]]


def without_ends(t: Trajectory) -> Trajectory:
    """The trajectory without some of its mask: the last token of each reply, so what ends a turn,
    and, unless it is the only one, the reply that ended the episode.
    """
    ends = ends_of_turns(t)
    last = ends[-2] if t.ended == "done" and len(ends) > 1 else len(t.ids)
    left = [int(acts and k not in ends and k < last) for k, acts in enumerate(t.action_mask)]
    return replace(t, action_mask=left) if any(left) else t
