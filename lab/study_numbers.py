"""The numbers of a report, on `runs`: method -> seed -> folder."""

import math
from pathlib import Path

import numpy as np

from dpo import Trajectory
from lab.runfiles import agents_of, explorations, of, phases_of
from lab.study_methods import task_counts, trained
from worlds import World
from worlds.files import read_jsonl

MEASURES = ("reward", "success")
THRESHOLDS = (0.6, 0.7, 0.8)  # of Table 2
# The 97.5% quantiles of Student's t distribution with 1, 2, ... degrees of freedom.
T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010,
     2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930)


def interval(values) -> dict:
    """Mean and half the width of its 95% t interval over seeds (None for one; from 20 on that of
    20)."""
    values = np.asarray(list(values), dtype=float)
    n = len(values)
    half = float(T[min(n, 20) - 2] * values.std(ddof=1) / math.sqrt(n)) if n > 1 else None
    return dict(n=n, mean=float(values.mean()), half=half)


def paired(a: dict[int, float], b: dict[int, float]) -> dict | None:
    """a - b on the seeds that both have: interval, on how many a is ahead, and what follows."""
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return None
    found = interval([a[s] - b[s] for s in seeds])
    sure = found["n"] > 2 and abs(found["mean"]) > found["half"]
    verdict = ("ahead" if found["mean"] > 0 else "behind") if sure else "undecided"
    return dict(found, ahead=sum(a[s] > b[s] for s in seeds), verdict=verdict)


def means(rows: list[dict]) -> dict:
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


def evaluations(runs: dict, second: bool) -> dict:
    """method -> split -> iteration -> measure -> seed -> value, of the target, or of the run's
    second agent."""
    found = {m: {} for m in runs}
    for m, seed, path in ((m, seed, path) for m in runs for seed, path in runs[m].items()):
        phases = phases_of(path)
        for e in of(phases, "evaluate"):
            if e["name"] in agents_of(phases)[int(second):][:1]:
                row = found[m].setdefault(e["split"], {}).setdefault(e["i"], {})
                for key in MEASURES:
                    row.setdefault(key, {})[seed] = e[key]
    return {m: by_split for m, by_split in found.items() if by_split}


def last(by_split: dict, split: str, key: str) -> dict[int, float]:
    """seed -> the last evaluation on a split."""
    return [*by_split[split].values()][-1][key] if split in by_split else {}


def cost(run: Path) -> dict:
    """Steps after the first SFT, the target's and all agents'; the target's tokens; rollouts; tasks
    that evolution ended with."""
    of_all, target = trained(run), trained(run, "target")
    return dict(steps_of_the_target=sum(e["steps"] for e in target),
                steps_of_all_agents=sum(e["steps"] for e in of_all),
                tokens_of_the_target=sum(e.get("tokens", 0) for e in target),
                rollouts=sum(e["episodes"] for e in explorations(phases_of(run)))
                + sum(e.get("episodes", 0) for e in target),  # of `evolve.py`
                tasks=(task_counts(run) or [0])[-1])


def hard_negatives(run: Path) -> float:
    """The share of hard negatives in what the failure agent explored once it had been trained."""
    return float(np.mean([e["hard"] for e in explorations(phases_of(run))
                          if e["name"] == "failure" and e["i"] > 1]))


def explored(run: Path, agent: str | None = None) -> list[Trajectory]:
    """All explored trajectories of a run, or one agent's."""
    return [Trajectory(**row) for e in explorations(phases_of(run)) if agent in (None, e["name"])
            for row in read_jsonl(run / e["output"])]


def table2(rewards: list[float], threshold: float) -> dict:
    """The paper's Table 2: shares of explored trajectories by their reward, together 1."""
    won = float(np.mean([r >= World.success for r in rewards]))
    hard = float(np.mean([threshold <= r < World.success for r in rewards]))
    return dict(success=won, negative=1 - won - hard, hard_negative=hard)
