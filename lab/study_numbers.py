"""The numbers of a report, on `runs`: method -> seed -> folder."""

import math
from functools import cache
from pathlib import Path

import numpy as np

from dpo import Trajectory
from lab.runfiles import agents_of, explorations, of, phases_of
from lab.study_methods import MEASURES, task_counts, trained
from worlds import World
from worlds.files import read_jsonl


@cache
def t_quantile(degrees: int) -> float:
    """The 97.5% quantile of Student's t distribution, of its density's integral from 0."""
    t = np.linspace(0, 13, 130001)
    density = (1 + t * t / degrees) ** (-(degrees + 1) / 2)
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    steps = (density[1:] + density[:-1]) / 2 * (t[1] / math.sqrt(math.pi * degrees))
    return float(np.interp(0.475, np.cumsum(steps) * math.exp(log_scale), t[1:]))


def interval(values) -> dict:
    """Mean and half the width of its 95% t interval (None for one value) over seeds."""
    values = np.asarray(list(values), dtype=float)
    n = len(values)
    half = float(t_quantile(n - 1) * values.std(ddof=1) / math.sqrt(n)) if n > 1 else None
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
    """Steps after the first SFT, the target's and all agents'; the target's tokens; rollouts."""
    of_all, target = trained(run), trained(run, "target")
    return dict(steps_of_the_target=sum(e["steps"] for e in target),
                steps_of_all_agents=sum(e["steps"] for e in of_all),
                tokens_of_the_target=sum(e.get("tokens", 0) for e in target),
                rollouts=sum(e["episodes"] for e in explorations(phases_of(run)))
                + sum(e.get("episodes", 0) for e in target))  # of `evolve.py`


def hard_negatives(run: Path) -> float:
    """The share of hard negatives in what the failure agent explored once it had been trained."""
    return float(np.mean([e["hard"] for e in explorations(phases_of(run))
                          if e["name"] == "failure" and e["i"] > 1]))


def evolution(run: Path) -> dict:
    """What a run of `evolve.py` took and made."""
    phases, tasks = phases_of(run), task_counts(run)

    def total(file, key, start=False):
        return sum(row.get(key, 0) for output, row in phases.items()
                   if output.endswith(file) and (row["i"] == 0) == start)

    return dict(agent_episodes=sum(e.get("episodes", 0) for e in trained(run, "target")),
                explorer_episodes=total("explored.jsonl", "episodes"),
                start_episodes=total("explored.jsonl", "episodes", start=True),
                first_tasks=tasks[0], last_tasks=tasks[-1],
                proposals=total("proposals.jsonl", "proposals"),
                added=total("proposals.jsonl", "added"))


def explored(run: Path, agent: str | None = None) -> list[Trajectory]:
    """All explored trajectories of a run, or one agent's."""
    return [Trajectory(**row) for e in explorations(phases_of(run)) if agent in (None, e["name"])
            for row in read_jsonl(run / e["output"])]


def table2(rewards: list[float], threshold: float) -> dict:
    """The paper's Table 2: shares of explored trajectories by their reward, together 1."""
    won = float(np.mean([r >= World.success for r in rewards]))
    hard = float(np.mean([threshold <= r < World.success for r in rewards]))
    return dict(success=won, negative=1 - won - hard, hard_negative=hard)
