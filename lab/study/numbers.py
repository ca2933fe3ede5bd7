"""The numbers of a report, on `runs`: method -> seed -> folder."""

import math
from functools import cache
from pathlib import Path

import numpy as np

from lab.harness.files import read_jsonl
from lab.harness.report import AGENTS, events
from lab.study.methods import MEASURES, trained
from lab.tokens import Trajectory


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


def evaluations(runs: dict, agents) -> dict:
    """method -> split -> iteration -> measure -> seed -> value; of second agents no run has two."""
    found = {m: {} for m in runs}
    for m, seed, path in ((m, seed, path) for m in runs for seed, path in runs[m].items()):
        for e in events(path)["evaluation"]:
            if e["agent"] in agents:
                row = found[m].setdefault(e["split"], {}).setdefault(e["iteration"], {})
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
                rollouts=sum(e["trajectories"] for e in events(run)["exploration"])
                + sum(e.get("episodes", 0) for e in target))  # of `lab/mutual.py`


def hard_negatives(run: Path) -> float:
    """The share of hard negatives in what the failure agent explored once it had been trained."""
    return float(np.mean([e["hard_negative"] for e in events(run)["exploration"]
                          if e["agent"] == "failure" and e["iteration"] > 1]))


def evolution(run: Path) -> dict:
    """What a run of `lab/mutual.py` took and made."""
    of, target = events(run), trained(run, "target")
    later = [e for e in of["proposals"] if e["iteration"]]  # 0 makes the start tasks
    return dict(agent_episodes=sum(e["episodes"] for e in target),
                explorer_episodes=sum(e["episodes"] for e in of["explored"] if e["iteration"]),
                start_episodes=sum(e["episodes"] for e in of["explored"] if not e["iteration"]),
                updates=sum(e["updates"] for e in of["grpo"]),
                skipped=sum(e["skipped"] for e in of["grpo"]),
                first_tasks=of["grpo"][0]["D"], last_tasks=of["grpo"][-1]["D"],
                replayed=sum(e["replayed"] for e in later), added=sum(e["added"] for e in later))


def explored(run: Path, agent: str | None = None) -> list[Trajectory]:
    """All explored trajectories of a run, or one agent's."""
    rows = [Trajectory(**row) for path in sorted(run.glob("iter*/*.jsonl"))
            if path.stem.split("-")[0] in AGENTS[1:]  # target.jsonl, target-more.jsonl
            for row in read_jsonl(path)]
    return [row for row in rows if agent in (None, row.agent)]
