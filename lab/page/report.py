"""Computes the results of a run: the tables of its page, and the evaluations in result.json."""

from collections import Counter, defaultdict
from datetime import timedelta
from functools import cache
from pathlib import Path
from statistics import fmean

import numpy as np

from common.files import write_json
from engine.console import SHARES, counted
from environments import environment
from lab.runfiles import SOLVED, config_of, evaluations_in, phases_of, rows_in

# A table is (title, names of the columns, rows). A column name that begins with < aligns its column
# to the left.
Table = tuple[str, list[str], list[tuple]]
SAMPLES = 2000  # number B of bootstrap samples
# Keys of a phase's record that are bookkeeping, not results.
RECORDS = {"function", "cache_key", "output", "i", "hash", "stat", "content", "edited"}


def bootstrap(values: list[list[np.ndarray]]) -> dict:
    """Computes the 95% percentile bootstrap interval of the mean over seeds and tasks.

    `values` contains one list per seed, with one array (N,) of task values per environment. Each
    sample draws seeds and tasks with replacement. In a sample, all seeds use the same tasks,
    because all runs evaluate the same tasks. Returns the bounds, `low` and `high`.
    """
    seeds = drawn(len(values), 0)                                                 # (B, S)
    total = 0
    for stream, of_seeds in enumerate(zip(*values), 1):
        means = seeds @ np.stack(of_seeds)                                        # (B, N)
        total += (means * drawn(means.shape[1], stream)).sum(1)                   # (B,)
    low, high = np.percentile(total / len(values[0]), [2.5, 97.5])
    return dict(low=float(low), high=float(high))


@cache
def drawn(n: int, stream: int) -> np.ndarray:
    """Draws n of n items with replacement. Returns the share of each item in each bootstrap sample,
    (B, n). `stream` is the seed of the random numbers."""
    return np.random.default_rng(stream).multinomial(n, np.full(n, 1 / n), SAMPLES) / n


def evaluation_records(run: Path, phases: dict) -> list[dict]:
    """Returns the records of all evaluation phases whose trajectory files still exist, with numbers
    computed from these files: the mean reward and its 95% interval from `low` to `high`, the
    success rate, the number of tasks, the number of episodes that reached the context limit, and
    the numbers that `scenarios` returns."""
    env = config_of(run)["settings"]["env"]
    evals = []
    for row in evaluations_in(phases):
        episodes = rows_in(run / row["output"])
        if not episodes:  # the split has no tasks, or the user has deleted or emptied the file
            continue
        rewards = rewards_by_task(episodes)
        by_task = np.array([np.mean(of_task) for of_task in rewards.values()])
        counted_again = dict(
            reward=fmean(episode["reward"] for episode in episodes),
            success=fmean(episode["reward"] >= SOLVED for episode in episodes),
            tasks=len(rewards),
            out_of_context=sum(episode["ended"] == "context_limit" for episode in episodes),
            **bootstrap([[by_task]]))
        evals.append(row | counted_again | scenarios(environment(env), rewards))
    return evals


def rewards_by_task(episodes: list[dict]) -> dict[str, list[float]]:
    """Returns the rewards of each task, from the rows of a trajectory file."""
    rewards = defaultdict(list)
    for episode in episodes:
        rewards[episode["task"]].append(episode["reward"])
    return rewards


def scenarios(env, rewards: dict[str, list[float]]) -> dict:
    """Returns AppWorld's scenario goal completion: the number of scenarios, which are groups of
    related tasks, and `sgc`, the share of scenarios in which every episode of every task is a
    success. Returns {} if the environment has no scenarios."""
    solved = {}  # scenario -> True if all its episodes are successes
    for task, of_task in rewards.items():
        scenario = env.scenario(task)
        if scenario:
            solved[scenario] = solved.get(scenario, True) and min(of_task) >= SOLVED
    return dict(scenarios=len(solved), sgc=float(np.mean([*solved.values()]))) if solved else {}


def close(run: Path) -> None:
    """Writes the evaluations to result.json. This file marks the run as finished."""
    write_json(run / "result.json", dict(evaluations=evaluation_records(run, phases_of(run))))


def tables(run: Path) -> list[Table]:
    """Returns a table of the evaluations, a table for each other kind of phase, and a table of
    totals."""
    phases = phases_of(run)
    evals = evaluation_records(run, phases)
    evaluated = {row["output"] for row in evals}
    kinds = defaultdict(list)  # name of a function -> the records of its phases
    total = Counter()
    for output, row in phases.items():
        if output not in evaluated:
            kinds[row["function"]].append(row)
        total.update({name: row[name] for name in ("seconds", "steps", "episodes", "tokens")
                      if isinstance(row.get(name), int | float)})
    result = [table_of("Evaluation; reward with its 95% bootstrap interval over tasks", evals)]
    result += [table_of(name.replace("_", " "), rows) for name, rows in kinds.items()]
    result.append(table_of("All phases", [dict(output=counted(len(phases), "phases"), **total)]))
    return [table for table in result if table[2]]


def table_of(title: str, rows: list[dict]) -> Table:
    """Returns a table with one row per phase and one column per result."""
    cells_of_rows = []
    columns = {}  # names, in order
    for row in rows:
        edited = " (edited since)" * ("edited" in row)
        cells = {"<phase": row["output"] + edited}
        for name, value in row.items():
            if name not in RECORDS:
                cells |= cells_of(name, value)
        columns |= cells
        cells_of_rows.append(cells)
    return title, [*columns], [tuple(cells.get(name, "-") for name in columns)
                               for cells in cells_of_rows]


def cells_of(name: str, value) -> dict[str, str]:
    """Formats one result of a phase, a number, a text or a dict of counts, as {column: text}. Each
    kind of preference pair has its own column."""
    title = name.replace("_", " ")
    if name == "pairs" and isinstance(value, dict):
        return {kind: f"{count:,}" for kind, count in value.items()}
    if isinstance(value, dict):
        return {f"<{title}": ", ".join(f"{n} {reason}" for reason, n in value.items()) or "-"}
    if not isinstance(value, int | float):
        return {f"<{title}": str(value)}
    if name == "seconds":
        return {"h:mm:ss": str(timedelta(seconds=round(value)))}
    if name in SHARES or name == "sgc":
        return {SHARES.get(name, name): f"{value:.1%}"}
    return {title: f"{value:.3f}" if isinstance(value, float) else f"{value:,}"}
