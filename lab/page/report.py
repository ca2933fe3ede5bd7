"""The result of a run and its closing table, finished or not."""

from collections import Counter, defaultdict
from datetime import timedelta
from pathlib import Path

import numpy as np

from common.files import headline, read_jsonl, write_json
from lab.chat.endpoint import USAGE
from lab.runfiles import config_of, explorations, kinds_of, of, phases_of, success_of
from worlds import environment

BEST = ("best", "best_success")


def bootstrap_interval(values) -> tuple[float, float]:
    """(low, high): 95% percentile bootstrap interval of the mean of `values`, one per task."""
    values = np.asarray(values, dtype=float)  # (N,)
    drawn = np.random.default_rng(0).integers(values.size, size=(1000, values.size))
    low, high = np.percentile(values[drawn].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def evaluations(run: Path, phases: dict) -> list[dict]:
    """What is recorded of the evaluations whose files are there, the interval `low`, `high` of the
    mean reward, and how many episodes filled the context."""
    found = []
    for row in (row for row in of(phases, "evaluate") if (run / row["output"]).is_file()):
        episodes, of_task = read_jsonl(run / row["output"]), defaultdict(list)
        for e in episodes:
            of_task[e["task"]].append(e["reward"])
        if not episodes:  # nothing was played, or somebody has emptied it
            continue
        low, high = bootstrap_interval([np.mean(rewards) for rewards in of_task.values()])
        found.append(dict(row, low=low, high=high, tasks=len(of_task),
                          out_of_context=sum(e["ended"] == "context" for e in episodes)))
    return found


def scenarios(run: Path, phases: dict) -> list[tuple]:
    """Of each evaluation how many scenarios it has, and the share of which all tasks are solved;
    none where the environment's tasks have no scenarios."""
    scenario_of = environment(config_of(run)["settings"]["env"]).scenario
    success = success_of(run)
    rows = []
    for e in of(phases, "evaluate"):
        file = run / e["output"]
        solved = defaultdict(list)
        for episode in read_jsonl(file) if file.is_file() else []:
            solved[scenario_of(episode["task"])].append(episode["reward"] >= success)
        solved.pop(None, None)
        if solved:
            share = np.mean([all(found) for found in solved.values()])
            rows.append((e["i"], e["name"], e["split"], len(solved), f"{share:.1%}"))
    return rows


def close(run: Path) -> str:
    """Writes result.json, which says that the run has finished; its closing table."""
    write_json(run / "result.json", dict(evaluations=evaluations(run, phases_of(run))))
    return table(run)


def table(run: Path) -> str:
    """Evaluations, exploration (the paper's Table 2), pairs and time, as plain text."""
    return "\n\n".join([f"{run}: {headline(config_of(run)['settings'])}",
                        *(section(*part) for part in sections(run))]) + "\n"


def sections(run: Path) -> list[tuple[str, str, list]]:
    """(title, header, rows) of each part of the table that has rows."""
    phases = phases_of(run)
    refused = Counter()
    for row in of(phases, "judge"):
        refused.update(row["refused"])
    dropped = []
    for output, row in phases.items():
        if row.get("dropped") and row.get("work") != "make_pairs":
            dropped.append((output, sum(row["dropped"].values()), reasons(row)))
    found = evaluations(run, phases)
    of_scenarios = ("Scenarios, and of how many all tasks are solved (SGC)",
                    "iteration <agent <split scenarios solved", scenarios(run, phases))
    parts = [of_evaluations(found), of_scenarios, of_endpoint(found), of_exploration(run, phases),
             of_pairs(phases), signals(phases),
             ("Proposals refused", "<reason count", refused.most_common()),
             ("Dropped", "<phase count <reasons", dropped), times(phases)]
    return [part for part in parts if part[2]]


def of_evaluations(found: list[dict]) -> tuple[str, str, list]:
    rows = []
    for e in found:
        interval = f"[{e['low']:.3f}, {e['high']:.3f}]"
        rows.append((e["i"], e["name"], e["split"], e["tasks"], f"{e['reward']:.3f}", interval,
                     f"{e['success']:.1%}", f"{e['turns']:.1f}", e["out_of_context"] or "-"))
    return ("Evaluation; reward with its 95% bootstrap interval over tasks",
            "iteration <agent <split tasks reward interval success steps out_of_context", rows)


def of_endpoint(found: list[dict]) -> tuple[str, str, list]:
    rows = []
    for e in found:
        numbers = []
        for name in (*BEST, "refused", "only_thoughts", "empty_replies", *USAGE):
            if e.get(name):
                number = f"{e[name]:.3f}" if name in BEST else f"{e[name]:,}"
                numbers.append(f"{name.replace('_', ' ')} {number}")
        if numbers:
            rows.append((e["output"], ", ".join(numbers)))
    return ("Of several rollouts the best; tasks that an endpoint refused, which count as 0, and "
            "what its answers took", "<phase <numbers", rows)


def of_exploration(run: Path, phases: dict) -> tuple[str, str, list]:
    """The paper's Table 2, for each agent and iteration."""
    threshold = config_of(run)["settings"]["hard_threshold"]
    success = success_of(run)
    kinds = f"a negative has a reward below {threshold}, a hard one from {threshold} to {success:g}"
    if success <= threshold:
        kinds = f"a negative has a reward below {success:g}, where success begins; none is hard"

    rows = []
    for e in explorations(phases):
        negative = max(0.0, 1 - e["success"] - e["hard"])  # but for rounding
        rows.append((e["i"], e["name"], e["episodes"], f"{e['success']:.1%}", f"{negative:.1%}",
                     f"{e['hard']:.1%}", f"{e['reward']:.3f}"))
    columns = "iteration <agent trajectories success negative hard_negative reward"
    return f"Exploration; {kinds}", columns, rows


def of_pairs(phases: dict) -> tuple[str, str, list]:
    kinds = kinds_of(phases)
    rows = []
    for e in of(phases, "make_pairs"):
        counts = [e["pairs"].get(kind, 0) for kind in kinds]
        rows.append((e["i"], e["trains"], *counts, sum(e["dropped"].values()), reasons(e)))
    return ("Pairs, by kind, and comparisons that made none, by reason",
            f"iteration <trains {' '.join(kinds)} dropped <reasons", rows)


def signals(phases: dict) -> tuple[str, str, list]:
    """What became of what the explorer of the second system found, and the tasks D after it."""
    rows = []
    for output, row in phases.items():
        if output.endswith("/tasks.jsonl"):
            signs, explored, proposed = (phases.get(output.replace("tasks", name), {})
                                         for name in ("signals", "explored", "proposals"))
            rows.append((row["i"], *(signs.get(kind, "-") for kind in (
                "forgetting", "boundary", "rare", "picked")), explored.get("episodes", "-"),
                *(proposed.get(name, "-") for name in ("proposals", "added")),
                row.get("left", "-"), row.get("D", row["tasks"])))
    return ("Signals, and what became of what the explorer found",
            "iteration forgetting boundary rare picked episodes proposals added left tasks", rows)


def times(phases: dict) -> tuple[str, str, list]:
    counts = ("steps", "episodes", "tokens")
    total = {key: sum(row.get(key, 0) for row in phases.values()) for key in ("seconds", *counts)}
    rows = [(output + " *" * ("reused" in row), row) for output, row in phases.items()]
    return ("Wall time; *: reused, not done again", " ".join(["<phase h:mm:ss", *counts]),
            [(name, timedelta(seconds=round(row["seconds"])),
              *(f"{row[key]:,}" if row.get(key) else "-" for key in counts))
             for name, row in [*rows, ("total", total)]])


def reasons(row: dict) -> str:
    return ", ".join(f"{why} {n}" for why, n in row["dropped"].items())


def columns(header: str) -> list[tuple[str, bool]]:
    """The names in a header, and whether a column is aligned to the left, which `<` marks."""
    return [(name.lstrip("<").replace("_", " "), name.startswith("<")) for name in header.split()]


def section(title: str, header: str, rows: list[tuple]) -> str:
    names, left = zip(*columns(header))
    cells = [names, *([str(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join([title, *("  ".join(
        cell.ljust(w) if to_left else cell.rjust(w)
        for cell, w, to_left in zip(row, widths, left)).rstrip() for row in cells)])
