"""RFT and RFT + DART: the agent's own successes join the experts (Section 5.1, 5.3)."""

import itertools
from collections import Counter
from pathlib import Path

from lab import play_env as envs
from lab.playing.episodes import usable_rollouts
from lab.program.run import Run
from lab.tokens import Trajectory
from lab.training.pairs import reopened


def more_where_hard(run: Run):
    """task -> numbers of DART's additional rollouts, more of them where the first failed.

    Section 5.3: n rollouts estimate the difficulty "based on the fraction of successful rollouts",
    which is multiplied by the budget N. So we read: N (1 - successes / n), rounded.
    """
    s, played, successes = run.settings, Counter(), Counter()
    for t in run.folder.trajectories("iter1/target.jsonl"):
        played[t.task] += 1
        successes[t.task] += t.reward >= envs.SUCCESS

    def extra(task: str) -> range:
        n = dart_rollouts(successes[task], played[task], s.dart_budget)
        return range(s.samples, s.samples + n)

    return extra


def dart_rollouts(successes: int, n: int, budget: int) -> int:
    return round(budget * (1 - successes / n)) if n else budget  # n = 0: all were lost


def join_successes(run: Run, out: Path) -> dict:
    """The experts and the sampled successes."""
    names = ["iter1/target.jsonl"] + ["iter1/target-more.jsonl"] * (run.settings.method == "dart")
    experts, dropped = run.folder.trajectories("experts.jsonl"), Counter()
    sampled = usable_rollouts(run, names, dropped)
    if run.settings.options.protocol == "eto":
        of = {e.task: e for e in experts}
        sampled = {task: [reopened(t, of[task]) for t in found] for task, found in sampled.items()}
    joined = join(experts, sampled, dropped)
    new = len(joined) - len(experts)
    run.folder.write_jsonl(out, joined)
    run.log("joined", experts=len(experts), successes=new, dropped=dropped)
    return dict(experts=len(experts), successes=new)


def join(experts: list[Trajectory], sampled: dict[str, list[Trajectory]],
         dropped: Counter) -> list[Trajectory]:
    """`experts` followed by the new successes in `sampled` (task -> trajectories); of those with
    equal actions, whatever the thoughts before them, the first is kept, the expert before all."""
    def actions(t: Trajectory):
        return t.task, *(" ".join(envs.parse_reply(m["content"]).split())
                         for m in t.messages if m["role"] == "assistant")

    joined, known = list(experts), {actions(e) for e in experts}
    for t in itertools.chain.from_iterable(sampled.values()):
        if t.reward < envs.SUCCESS:
            dropped["failure"] += 1
        elif actions(t) in known:
            dropped["known already"] += 1
        else:
            known.add(actions(t))
            joined.append(t)
    return joined
