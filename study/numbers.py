"""The numbers of a report: means over seeds, their intervals, differences on the same seeds.

`runs`: method -> seed -> folder. `curves`: method -> split -> iteration -> measure -> seed -> value
of an agent's evaluations.
"""

import itertools
import math
from functools import cache
from pathlib import Path

import numpy as np

from dpo import Trajectory
from harness.files import read_jsonl
from harness.report import AGENTS, KINDS, events, result
from harness.report import table2 as shares_of
from study.methods import CLAIMS, EVOLUTIONS, MEASURES, THRESHOLDS, trained


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
    n, half = len(values), None
    if n > 1:
        half = float(t_quantile(n - 1) * values.std(ddof=1) / math.sqrt(n))
    return dict(n=n, mean=float(values.mean()), half=half)


def paired(a: dict[int, float], b: dict[int, float]) -> dict | None:
    """a - b on the seeds that both have: interval, on how many a is ahead, and what follows."""
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return None
    found = interval([a[s] - b[s] for s in seeds])
    sure = found["n"] > 2 and abs(found["mean"]) > found["half"]
    verdict = ("ahead" if found["mean"] > 0 else "behind") if sure else "undecided"
    return dict(found, ahead=sum(a[s] > b[s] for s in seeds), seeds=seeds, verdict=verdict)


def numbers(runs: dict) -> dict:
    """All that a report says, as JSON takes it, but for Figure 3."""
    target, second = curves(runs, AGENTS[1:2]), curves(runs, AGENTS[2:])
    splits = list(dict.fromkeys(split for by_split in target.values() for split in by_split))
    return dict(
        splits=splits, seeds={m: list(found) for m, found in runs.items()},
        main={m: {**finals(target[m]), **means([cost(path) for path in runs[m].values()])}
              for m in runs},
        second_agents={m: finals(second[m]) for m in runs if second[m]},
        paired=paired_table(target, splits), evolutions=evolutions(runs), table2=table2(runs),
        course=course(runs), figure4=figure4(runs, target),
        curves={agent: {m: {split: {i: {key: interval(values.values()) for key, values in
                                        row.items()} for i, row in by.items()}
                            for split, by in by_split.items()} for m, by_split in found.items()
                        if by_split}
                for agent, found in (("target", target), ("second", second))})


def curves(runs: dict, agents) -> dict:
    """What the evaluations of an agent gave; of the two second ones no run has both."""
    found = {m: {} for m in runs}
    for m, seed, path in ((m, seed, path) for m in runs for seed, path in runs[m].items()):
        for e in result(path)["evaluations"]:
            if e["agent"] in agents:
                row = found[m].setdefault(e["split"], {}).setdefault(e["iteration"], {})
                for key in MEASURES:
                    row.setdefault(key, {})[seed] = e[key]
    return found


def last(by_split: dict, split: str, key: str) -> dict[int, float]:
    """seed -> the last evaluation on a split."""
    return [*by_split[split].values()][-1][key] if split in by_split else {}


def finals(by_split: dict) -> dict:
    """split -> measure -> interval over seeds of the last evaluation."""
    return {split: {key: interval(last(by_split, split, key).values()) for key in MEASURES}
            for split in by_split}


def paired_table(target: dict, splits) -> list[dict]:
    """The differences of CLAIMS, paired by seed, on each split and measure that has both."""
    rows = []
    for a, b, source in (claim for claim in CLAIMS if {*claim[:2]} <= target.keys()):
        for split, key in itertools.product(splits, MEASURES):
            if found := paired(last(target[a], split, key), last(target[b], split, key)):
                rows.append(dict(a=a, b=b, source=source, split=split, measure=key, **found))
    return rows


def figure4(runs: dict, target: dict) -> dict:
    """lambda_SFT -> split -> interval over seeds of co-evolution's final reward."""
    found = {}
    for m in (m for m in runs if m == "coevolve" or m.startswith("lambda-")):
        weight = result(next(iter(runs[m].values())))["settings"]["lambda_sft"]
        found[weight] = {split: row["reward"] for split, row in finals(target[m]).items()}
    return {str(weight): found[weight] for weight in sorted(found)}


def means(rows: list[dict]) -> dict:
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


def cost(run: Path) -> dict:
    """Steps after the first SFT, the target's and all agents'; the target's tokens; rollouts."""
    of_all, target = trained(run), trained(run, "target")
    return dict(target_steps=sum(e["steps"] for e in target),
                all_steps=sum(e["steps"] for e in of_all),
                target_tokens=sum(e.get("tokens", 0) for e in target),
                rollouts=sum(e["trajectories"] for e in result(run)["exploration"])
                + sum(e.get("episodes", 0) for e in target))  # of `mutual.py`


def explored(run: Path, agent: str | None = None) -> list[Trajectory]:
    """All explored trajectories of a run, or one agent's."""
    rows = [Trajectory(**row) for path in sorted(run.glob("iter*/*.jsonl"))
            if path.stem.split("-")[0] in AGENTS[1:]  # target.jsonl, target-more.jsonl
            for row in read_jsonl(path)]
    return [row for row in rows if agent in (None, row.agent)]


def evolutions(runs: dict) -> dict:
    """method of `mutual.py` -> means over seeds of what its runs took and made."""
    return {m: means([evolution(path) for path in runs[m].values()])
            for m in runs if m in EVOLUTIONS}


def evolution(run: Path) -> dict:
    of = events(run)
    later = [e for e in of["proposals"] if e["iteration"]]  # 0 makes the start tasks
    return dict(
        agent_episodes=sum(e["episodes"] for e in trained(run, "target")),
        explorer_episodes=sum(e["episodes"] for e in of["explored"] if e["iteration"]),
        start_episodes=sum(e["episodes"] for e in of["explored"] if not e["iteration"]),
        updates=sum(e["updates"] for e in of["grpo"]),
        skipped=sum(e["skipped"] for e in of["grpo"]),
        first_tasks=of["grpo"][0]["D"], last_tasks=of["grpo"][-1]["D"],
        replayed=sum(e["replayed"] for e in later), added=sum(e["added"] for e in later))


def table2(runs: dict) -> dict:
    """method -> threshold -> share -> interval over seeds, of all explored trajectories.

    Where both are there, co-evolution's share minus ETO's too, on the same seeds.
    """
    names = ("success", "negative", "hard_negative")
    of = {m: {seed: explored(path) for seed, path in runs[m].items()}
          for m in ("eto", "positive", "coevolve") if m in runs}
    share = {(m, t): {seed: shares_of(rows, t) for seed, rows in of[m].items()}
             for m in of for t in THRESHOLDS}

    def by(m, t, key):
        return {seed: shares[key] for seed, shares in share[m, t].items()}

    found = {m: {str(t): {key: interval(by(m, t, key).values()) for key in names}
                 for t in THRESHOLDS} for m in of}
    if {"eto", "coevolve"} <= of.keys():
        found["coevolve - eto"] = {str(t): {key: paired(by("coevolve", t, key), by("eto", t, key))
                                            for key in names} for t in THRESHOLDS}
    return found


def course(runs: dict) -> list[dict]:
    """Iteration by iteration of co-evolution: explored rewards, hard negatives, pairs; means."""
    table = {}
    for path in runs.get("coevolve", {}).values():
        found = result(path)
        for e in found["exploration"]:
            for key in ("reward", "success", "hard_negative"):
                table.setdefault((e["iteration"], f"{e['agent']} {key}"), []).append(e[key])
        for e in found["pairs"]:
            for kind in (kind for kind in KINDS if kind in e["kept"]):
                column = f"pairs of the {e['trains']}: {kind}"
                table.setdefault((e["iteration"], column), []).append(e["kept"][kind])
    return [dict(iteration=i, **{name: float(np.mean(values)) for (j, name), values in
                                 table.items() if j == i}) for i in sorted({i for i, _ in table})]
