"""The numbers of a report: means over seeds, their intervals, differences on the same seeds.

`runs`: method -> seed -> folder. `by_run`: (method, seed) -> `scores` of an agent.
"""

import itertools
import math
from pathlib import Path

import numpy as np

from dpo import Trajectory
from harness.files import read_jsonl
from harness.report import AGENTS, KINDS, events, reading, result
from harness.report import table2 as shares_of
from study.methods import CLAIMS, EVOLUTIONS, MEASURES, THRESHOLDS, of_target, trained

# The 97.5% quantiles of Student's t distribution, as tables print them.
DEGREES = [*range(1, 31), 40, 60, 120, math.inf]
QUANTILES = [
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788,
    2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639,
    2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423, 2.0211, 2.0003, 1.9799, 1.9600]


def t_quantile(degrees: int) -> float:
    """The table's value, between its rows linear in 1 / degrees, as such tables are read."""
    return float(np.interp(-1 / degrees, [-1 / d for d in DEGREES], QUANTILES))


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


def scores(run: Path, *agents: str) -> dict[str, list[dict]]:
    """split -> an agent's evaluations, by iteration; of the two named no run has both."""
    found = {}
    with reading(run / "metrics.jsonl"):
        for e in result(run)["evaluations"]:
            if e["agent"] in agents:
                found.setdefault(e["split"], []).append({k: e[k] for k in ("iteration", *MEASURES)})
    return found


def cost(run: Path) -> dict:
    """Steps after the first SFT, the target's and all agents'; the target's tokens; rollouts."""
    of_all = trained(run)
    with reading(run / "metrics.jsonl"):
        return dict(target_steps=sum(e["steps"] for e in of_target(of_all)),
                    all_steps=sum(e["steps"] for e in of_all),
                    target_tokens=sum(e.get("tokens", 0) for e in of_target(of_all)),
                    rollouts=sum(e["trajectories"] for e in result(run)["exploration"])
                    + sum(e.get("episodes", 0) for e in of_target(of_all)))  # of `mutual.py`


def explored(run: Path, agent: str | None = None) -> list:
    """All explored trajectories of a run, or one agent's."""
    rows = []
    for path in sorted(run.glob("iter*/*.jsonl")):
        if path.stem.split("-")[0] in AGENTS[1:]:  # target.jsonl, target-more.jsonl
            with reading(path):
                rows += [Trajectory(**row) for row in read_jsonl(path)]
    return [row for row in rows if agent in (None, row.agent)]


def final(by_run, method: str, split: str, key: str) -> dict[int, float]:
    """seed -> the last evaluation."""
    return {s: found[split][-1][key] for (m, s), found in by_run.items()
            if m == method and split in found}


def finals(by_run, method: str, splits) -> dict:
    """"SPLIT reward" and "SPLIT success" -> interval over seeds."""
    return {f"{split} {key}": interval(final(by_run, method, split, key).values())
            for split in splits for key in MEASURES}


def means(rows: list[dict]) -> dict:
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


def main_table(runs, by_run, splits) -> dict:
    return {m: {**finals(by_run, m, splits), **means([cost(path) for path in runs[m].values()])}
            for m in runs}


def second_agents(runs, second, splits) -> dict:
    """method -> finals of its failure agent or second positive agent, where it has one."""
    return {m: finals(second, m, splits) for m in runs if any(second[m, s] for s in runs[m])}


def paired_table(by_run, splits) -> list[dict]:
    """The differences of CLAIMS, paired by seed, on each split and measure that has both."""
    rows = []
    for a, b, source in CLAIMS:
        for split, key in itertools.product(splits, MEASURES):
            if found := paired(final(by_run, a, split, key), final(by_run, b, split, key)):
                rows.append(dict(a=a, b=b, source=source, split=split, measure=key, **found))
    return rows


def evolutions(runs) -> dict:
    """method of `mutual.py` -> means over seeds of what its runs took and made."""
    found = {}
    for m in (m for m in runs if m in EVOLUTIONS):
        rows = []
        for path in runs[m].values():
            with reading(path / "metrics.jsonl"):
                of = events(path)
                later = [e for e in of["proposals"] if e["iteration"]]  # 0 makes the start tasks
                rows.append(dict(
                    agent_episodes=sum(e["episodes"] for e in of["phase"]
                                       if e["phase"].endswith("/target-agent")),
                    explorer_episodes=sum(e["episodes"] for e in of["explored"] if e["iteration"]),
                    start_episodes=sum(e["episodes"] for e in of["explored"] if not e["iteration"]),
                    updates=sum(e["updates"] for e in of["grpo"]),
                    skipped=sum(e["skipped"] for e in of["grpo"]),
                    first_tasks=of["grpo"][0]["D"], last_tasks=of["grpo"][-1]["D"],
                    replayed=sum(e["replayed"] for e in later),
                    added=sum(e["added"] for e in later)))
        found[m] = means(rows)
    return found


def table2(runs) -> dict:
    """method -> threshold -> share -> interval over seeds, of all explored trajectories.

    Where both are there, co-evolution's share minus ETO's too, on the same seeds.
    """
    found, names = {}, ("success", "negative", "hard_negative")
    of = {m: {seed: shares(path) for seed, path in runs[m].items()}
          for m in ("eto", "positive", "coevolve") if m in runs}

    def share(m, t, key):
        return {seed: by[t][key] for seed, by in of[m].items()}

    for m in of:
        found[m] = {str(t): {key: interval(share(m, t, key).values()) for key in names}
                    for t in THRESHOLDS}
    if {"eto", "coevolve"} <= of.keys():
        found["coevolve - eto"] = {str(t): {key: paired(share("coevolve", t, key),
                                                        share("eto", t, key)) for key in names}
                                   for t in THRESHOLDS}
    return found


def shares(run: Path) -> dict:
    """threshold -> Table 2 of all explored trajectories of a run."""
    rows = explored(run)
    return {t: shares_of(rows, t) for t in THRESHOLDS}


def course(runs) -> list[dict]:
    """Iteration by iteration of co-evolution: explored rewards, hard negatives, pairs; means."""
    table = {}
    for path in runs.get("coevolve", {}).values():
        found = result(path)
        with reading(path / "metrics.jsonl"):
            for e in found["exploration"]:
                for key in ("reward", "success", "hard_negative"):
                    table.setdefault((e["iteration"], f"{e['agent']} {key}"), []).append(e[key])
            for e in found["pairs"]:
                for kind in (kind for kind in KINDS if kind in e["kept"]):
                    column = f"pairs of the {e['trains']}: {kind}"
                    table.setdefault((e["iteration"], column), []).append(e["kept"][kind])
    return [dict(iteration=i, **{name: float(np.mean(values)) for (j, name), values in
                                 table.items() if j == i}) for i in sorted({i for i, _ in table})]


def curves(runs, by_run, splits) -> dict:
    """method -> split -> iteration -> interval over seeds of the target's reward."""
    return {m: {split: {e["iteration"]: interval(
        found[split][n]["reward"] for (method, _), found in by_run.items()
        if method == m and len(found.get(split, ())) > n)
        for n, e in enumerate(by_run[m, next(iter(runs[m]))].get(split, ()))} for split in splits}
        for m in runs}


def figure4(runs, by_run, splits) -> dict:
    """lambda_SFT -> split -> interval over seeds of co-evolution's final reward."""
    values = {}
    for m in (m for m in runs if m == "coevolve" or m.startswith("lambda-")):
        for seed, path in runs[m].items():
            weight = result(path)["settings"]["lambda_sft"]
            for split in splits:
                values.setdefault(weight, {}).setdefault(split, {})[seed] = (
                    by_run[m, seed][split][-1]["reward"])
    return {str(w): {split: interval(v.values()) for split, v in values[w].items()}
            for w in sorted(values)}
