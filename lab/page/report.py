"""The numbers of a run, finished or not: the tables of its page, and its result.json."""

from collections import Counter, defaultdict
from datetime import timedelta
from pathlib import Path

import numpy as np

from common.files import read_jsonl, write_json
from lab.runfiles import (
    SOLVED,
    config_of,
    evaluations_in,
    explorations_in,
    kinds_of,
    pairs_in,
    phases_of,
    that_found,
)
from worlds import ENVIRONMENTS, environment

# A table: its title, the names of its columns, and rows. A column whose name begins with < is
# aligned to the left.
Table = tuple[str, list[str], list[tuple]]

# What is recorded of every evaluation; what else is there has a table of its own.
OF_ALL = {"work", "recipe", "name", "i", "output", "from", "split", "seconds", "episodes", "reward",
          "success", "hard", "turns", "budget", "low", "high", "tasks", "out_of_context"}
SIGNS = ("forgetting", "boundary", "rare", "picked")  # what is counted of signals


def bootstrap_interval(values) -> tuple[float, float]:
    """(low, high): 95% percentile bootstrap interval of the mean of `values`, one per task."""
    values = np.asarray(values, dtype=float)                                      # (N,)
    drawn = np.random.default_rng(0).integers(values.size, size=(1000, values.size))
    low, high = np.percentile(values[drawn].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def evaluations(run: Path, phases: dict) -> list[dict]:
    """What is recorded of the evaluations, the interval `low`, `high` of the mean reward, and how
    many episodes filled the context."""
    found = []
    for row in evaluations_in(run, phases):
        of_task = defaultdict(list)
        full = 0
        for episode in read_jsonl(run / row["output"]):
            of_task[episode["task"]].append(episode["reward"])
            full += episode["ended"] == "context"
        if of_task:  # else nothing was played, or somebody has emptied the file
            low, high = bootstrap_interval([np.mean(rewards) for rewards in of_task.values()])
            found.append(row | dict(low=low, high=high, tasks=len(of_task), out_of_context=full))
    return found


def close(run: Path) -> None:
    """Writes result.json, which says that the run has finished."""
    write_json(run / "result.json", dict(evaluations=evaluations(run, phases_of(run))))


def tables(run: Path) -> list[Table]:
    """What there is to say of a run."""
    phases = phases_of(run)
    found = evaluations(run, phases)
    made = [of_evaluations(found), of_scenarios(run, found), of_more(found),
            of_exploration(run, phases), of_pairs(phases), of_tasks(phases), of_refusals(phases),
            of_dropped(phases), of_times(phases)]
    return [table for table in made if table[2]]


def of_evaluations(found: list[dict]) -> Table:
    rows = []
    for e in found:
        rows.append((e["i"], e["name"], e["split"], e["tasks"], f"{e['reward']:.3f}",
                     f"[{e['low']:.3f}, {e['high']:.3f}]", f"{e['success']:.1%}",
                     f"{e['turns']:.1f}", e["out_of_context"] or "-"))
    return ("Evaluation; reward with its 95% bootstrap interval over tasks",
            ["iteration", "<agent", "<split", "tasks", "reward", "interval", "success", "steps",
             "out of context"], rows)


def of_scenarios(run: Path, found: list[dict]) -> Table:
    """How many scenarios an evaluation has, and of how many all tasks are solved; none where the
    environment's tasks have no scenarios."""
    env = config_of(run)["settings"]["env"]
    rows = []
    for e in found if env in ENVIRONMENTS else []:
        solved = {}  # scenario -> whether all its tasks are
        for episode in read_jsonl(run / e["output"]):
            scenario = environment(env).scenario(episode["task"])
            solved[scenario] = solved.get(scenario, True) and episode["reward"] >= SOLVED
        solved.pop(None, None)
        if solved:
            share = sum(solved.values()) / len(solved)
            rows.append((e["i"], e["name"], e["split"], len(solved), f"{share:.1%}"))
    return ("Scenarios, and of how many all tasks are solved (SGC)",
            ["iteration", "<agent", "<split", "scenarios", "solved"], rows)


def of_more(found: list[dict]) -> Table:
    """What else an evaluation counted, such as an endpoint's refusals and tokens."""
    rows = []
    for e in found:
        numbers = [f"{name.replace('_', ' ')} {number(value)}" for name, value in e.items()
                   if name not in OF_ALL and value and isinstance(value, int | float)]
        if numbers:
            rows.append((e["output"], ", ".join(numbers)))
    return "What else was counted", ["<phase", "<numbers"], rows


def of_exploration(run: Path, phases: dict) -> Table:
    """The paper's Table 2, for each agent and iteration."""
    threshold = config_of(run)["settings"]["hard_threshold"]
    rows = []
    for e in explorations_in(phases):
        negative = max(0.0, 1 - e["success"] - e["hard"])  # but for rounding
        rows.append((e["i"], e["name"], e["episodes"], f"{e['success']:.1%}", f"{negative:.1%}",
                     f"{e['hard']:.1%}", f"{e['reward']:.3f}"))
    return (f"Exploration; a negative has a reward below {threshold}, a hard one from {threshold} "
            "to 1", ["iteration", "<agent", "trajectories", "success", "negative", "hard negative",
                     "reward"], rows)


def of_pairs(phases: dict) -> Table:
    kinds = kinds_of(phases)
    rows = []
    for e in pairs_in(phases):
        dropped = counts_in(e, "dropped")
        rows.append((e["i"], e["trains"], *(e["pairs"].get(kind, 0) for kind in kinds),
                     sum(dropped.values()), reasons(dropped)))
    return ("Pairs, by kind, and comparisons that made none, by reason",
            ["iteration", "<trains", *kinds, "dropped", "<reasons"], rows)


def of_tasks(phases: dict) -> Table:
    """What became of what the explorer of the second system found, and the tasks D after it."""
    rows = []
    for row in that_found(phases, "tasks"):
        folder = row["output"].removesuffix("tasks.jsonl")
        if folder == row["output"]:
            continue
        signs = phases.get(f"{folder}signals.jsonl", {})
        explored = phases.get(f"{folder}explored.jsonl", {})
        proposed = phases.get(f"{folder}proposals.jsonl", {})
        rows.append((row["i"], *(signs.get(kind, "-") for kind in SIGNS),
                     explored.get("episodes", "-"), proposed.get("proposals", "-"),
                     proposed.get("added", "-"), row.get("D", row["tasks"])))
    return ("Signals, and what became of what the explorer found",
            ["iteration", *SIGNS, "episodes", "proposals", "added", "tasks"], rows)


def of_refusals(phases: dict) -> Table:
    refused = Counter()
    for row in phases.values():
        refused.update(counts_in(row, "refused"))
    return "Proposals refused", ["<reason", "count"], refused.most_common()


def of_dropped(phases: dict) -> Table:
    """What phases left out, but for those that made pairs."""
    rows = []
    for output, row in phases.items():
        dropped = counts_in(row, "dropped")
        if dropped and "pairs" not in row:
            rows.append((output, sum(dropped.values()), reasons(dropped)))
    return "Dropped", ["<phase", "count", "<reasons"], rows


def of_times(phases: dict) -> Table:
    counts = ("steps", "episodes", "tokens")
    total = Counter()
    rows = []
    for output, row in phases.items():
        took = [row.get(name) for name in counts]
        taken_over = " *" if "from" in row else ""
        rows.append((f"{output}{taken_over}", timedelta(seconds=round(row["seconds"])),
                     *map(number, took)))
        if not taken_over:
            total["seconds"] += row["seconds"]
            total.update({name: value for name, value in zip(counts, took)
                          if isinstance(value, int)})
    if rows:
        rows.append(("total", timedelta(seconds=round(total["seconds"])),
                     *(number(total[name]) for name in counts)))
    return ("Wall time; *: taken over from another run, and not in the total",
            ["<phase", "h:mm:ss", *counts], rows)


def counts_in(row: dict, name: str) -> dict[str, int]:
    """What is counted by reason in what is recorded of a phase."""
    return row[name] if isinstance(row.get(name), dict) else {}


def number(value) -> str:
    """A number as text; - for none."""
    if not value or not isinstance(value, int | float):
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def reasons(dropped: dict[str, int]) -> str:
    return ", ".join(f"{why} {n}" for why, n in dropped.items())
