"""The numbers of a run, finished or not: the tables of its page, and its result.json."""

from collections import Counter, defaultdict
from datetime import timedelta
from pathlib import Path
from statistics import fmean

import numpy as np

from common.files import read_jsonl, write_json
from engine.console import SHARES, counted
from environments import environment
from lab.runfiles import SOLVED, config_of, phases_of, that_found

# A table: its title, the names of its columns, and rows. A column whose name begins with < is
# aligned to the left.
Table = tuple[str, list[str], list[tuple]]
# What is recorded beside what was found.
RECORDS = {"function", "cache_key", "output", "i", "hash", "edited"}


def bootstrap_interval(values) -> tuple[float, float]:
    """(low, high): 95% percentile bootstrap interval of the mean of `values`, one per task."""
    values = np.asarray(values, dtype=float)                                      # (N,)
    drawn = np.random.default_rng(0).integers(values.size, size=(1000, values.size))
    low, high = np.percentile(values[drawn].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def evaluations(run: Path, phases: dict) -> list[dict]:
    """What is recorded of the evaluations whose files are there, and what the files say: the mean
    reward and its interval `low`, `high`, the share of successes, how many episodes filled the
    context, and the share of scenarios of which all tasks are solved, where tasks have scenarios.
    """
    env = config_of(run)["settings"]["env"]
    found = []
    for row in that_found(phases, "split", "name", "episodes", "reward", "success"):
        file = run / row["output"]
        episodes = read_jsonl(file) if file.is_file() else []
        if not episodes:  # nothing was played, or somebody has emptied the file
            continue
        of_task = defaultdict(list)
        for episode in episodes:
            of_task[episode["task"]].append(episode["reward"])
        reward = fmean(episode["reward"] for episode in episodes)
        success = fmean(episode["reward"] >= SOLVED for episode in episodes)
        low, high = bootstrap_interval([np.mean(rewards) for rewards in of_task.values()])
        full = sum(episode["ended"] == "context_limit" for episode in episodes)
        said = dict(reward=reward, success=success, low=low, high=high, tasks=len(of_task),
                    out_of_context=full)
        found.append(row | said | scenarios(environment(env), of_task))
    return found


def scenarios(env, of_task: dict[str, list[float]]) -> dict:
    """How many scenarios some tasks are of, and the share of which all are solved (SGC)."""
    solved = {}
    for task, rewards in of_task.items():
        scenario = env.scenario(task)
        if scenario:
            solved[scenario] = solved.get(scenario, True) and min(rewards) >= SOLVED
    return dict(scenarios=len(solved), sgc=float(np.mean([*solved.values()]))) if solved else {}


def close(run: Path) -> None:
    """Writes result.json, which says that the run has finished."""
    write_json(run / "result.json", dict(evaluations=evaluations(run, phases_of(run))))


def tables(run: Path) -> list[Table]:
    """A table for each kind of phase, evaluations first, and what all of them took."""
    phases = phases_of(run)
    found = evaluations(run, phases)
    evaluated = {row["output"] for row in found}
    kinds = defaultdict(list)  # the name of a phase's function -> what is recorded of such phases
    total = Counter()
    for output, row in phases.items():
        if output not in evaluated:
            kinds[row["function"]].append(row)
        total.update({name: row[name] for name in ("seconds", "steps", "episodes", "tokens")
                      if isinstance(row.get(name), int | float)})
    made = [table_of("Evaluation; reward with its 95% bootstrap interval over tasks", found)]
    made += [table_of(work.replace("_", " "), rows) for work, rows in kinds.items()]
    made.append(table_of("All phases", [dict(output=counted(len(phases), "phases"), **total)]))
    return [table for table in made if table[2]]


def table_of(title: str, rows: list[dict]) -> Table:
    """A table of what was found by some phases, a phase a row and a number a column."""
    shown = []
    columns = {}
    for row in rows:
        edited = " (edited since)" * ("edited" in row)
        cells = {"<phase": row["output"] + edited}
        for name, value in row.items():
            if name not in RECORDS:
                cells |= cells_of(name, value)
        columns |= cells
        shown.append(cells)
    return title, [*columns], [tuple(cells.get(name, "-") for name in columns) for cells in shown]


def cells_of(name: str, value) -> dict[str, str]:
    """column -> text, of a number, of a name, or of counts by kind or reason."""
    title = name.replace("_", " ")
    if name == "pairs" and isinstance(value, dict):
        return {kind: f"{count:,}" for kind, count in value.items()}
    if isinstance(value, dict):
        return {f"<{title}": ", ".join(f"{count} {why}" for why, count in value.items()) or "-"}
    if not isinstance(value, int | float):
        return {f"<{title}": str(value)}
    if name == "seconds":
        return {"h:mm:ss": str(timedelta(seconds=round(value)))}
    if name in SHARES or name == "sgc":
        return {SHARES.get(name, name): f"{value:.1%}"}
    return {title: f"{value:.3f}" if isinstance(value, float) else f"{value:,}"}
