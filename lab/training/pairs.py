"""A file of pairs as what a phase trains on: each trajectory once, perhaps without a part."""

from dataclasses import replace

from lab import play_env as envs
from lab import tokens as dpo
from lab.tokens import Trajectory


def preference_groups(run, agent: str, i: int) -> list[dpo.Group]:
    """pairs-AGENT.jsonl as groups: an instruction's distinct trajectories, once each, its pairs."""
    s, folder = run.settings, run.folder
    pairs = folder.read_jsonl(f"iter{i}/pairs-{agent}.jsonl")
    names = {"experts.jsonl", *(p[side]["file"] for p in pairs for side in ("chosen", "rejected"))}
    trajectories = {(name, t.task, t.rollout): t
                    for name in names for t in folder.trajectories(name)}
    groups, places, shortened = {}, {}, []  # places: (trajectory, how it is cut) -> index
    for p in pairs:
        task = p["task"]
        group = groups.setdefault(task, dpo.Group(task, []))
        expert = trajectories["experts.jsonl", task, 0]
        # A rejected trajectory that wanders on long after the expert was done teaches little.
        longest = expert.steps + s.cut_turns if s.cut_turns >= 0 else float("inf")
        indices = []
        for side in ("chosen", "rejected"):
            key = p[side]["file"], task, p[side]["rollout"]
            turns = (longest if side == "rejected" and trajectories[key].steps > longest else None)
            endless = side == "rejected" and s.rejected_ends == "leave out"
            if (key, turns, endless) not in places:
                places[key, turns, endless] = len(group.sequences)
                t = trajectories[key]
                t = cut(reopened(t, expert) if s.options.protocol == "eto" else t, turns)
                group.sequences.append(without_ends(t) if endless else t)
                shortened += [task] if turns is not None else []
            indices.append(places[key, turns, endless])
        group.pairs.append(dpo.Pair(p["kind"], *indices, p["weight"], p["sft_weight"]))
    run.log.dropped(f"iter{i}/{agent}-agent", "end of a rejected trajectory, --cut-turns",
                    shortened)
    return list(groups.values())


def reopened(t: Trajectory, like: Trajectory) -> Trajectory:
    """The trajectory's replies after the opening of another one of its task. So ETO trains: without
    the example that a rollout was shown; the sides of a pair share the expert's first turn."""
    old, new = t.action_mask.index(1), like.action_mask.index(1)
    turns, others = (envs.first_reply(x.messages, x.steps) for x in (t, like))
    return replace(t, ids=like.ids[:new] + t.ids[old:],
                   action_mask=like.action_mask[:new] + t.action_mask[old:],
                   messages=like.messages[:others] + t.messages[turns:])


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
