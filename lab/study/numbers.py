"""Computes the numbers of a report on several runs.

`runs` contains the folders of the runs, as runs[arm][seed]. An evaluation is a dict. It has the
record of an evaluation phase, the numbers that `lab.page.report.evaluations` adds to the record,
and the arm, the seed and the rewards (see `evaluations`).
"""

import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import transformers

from common.files import read_jsonl
from engine.models import read_model
from lab.page import report
from lab.runfiles import SOLVED, explorations_in, is_finished, phases_of, rows_in
from lab.study.methods import Runs, each, task_counts, training_phases

THRESHOLDS = (0.6, 0.7, 0.8)  # minimum rewards of a hard negative [Table 2]
# The 97.5% quantiles of Student's t distribution with 1, 2, ... degrees of freedom.
T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010,
     2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930)


def interval(values) -> dict | None:
    """Computes the mean of some values, one per seed, and its 95% t interval.

    Returns a dict with the number of values `n`, their `mean`, and `half`, which is half the width
    of the interval. A single value has no interval, so `half` is None. For more than 20 values the
    t quantile for 20 values is used. Returns None if there are no values.
    """
    values = np.asarray(list(values), dtype=float)
    n = len(values)
    if n == 0:
        return None
    half = None
    if n > 1:
        half = float(T[min(n, 20) - 2] * values.std(ddof=1) / math.sqrt(n))
    return dict(n=n, mean=float(values.mean()), half=half)


def paired(a: dict[int, float], b: dict[int, float]) -> dict | None:
    """Computes the mean and the interval of the differences a - b.

    Args:
        a: The values of the first arm, by seed.
        b: The values of the second arm, by seed.

    Returns:
        The result of `interval` on the seeds that both arms have, with two more keys. `ahead` is
        the number of seeds on which a is larger than b. `sure` is True if there are at least three
        seeds and the interval excludes 0. None if no seed is common to both arms.
    """
    seeds = a.keys() & b.keys()
    lead = interval([a[seed] - b[seed] for seed in seeds])
    if lead is None:
        return None
    ahead = sum(a[seed] > b[seed] for seed in seeds)
    sure = lead["n"] > 2 and abs(lead["mean"]) > lead["half"]
    return lead | dict(ahead=ahead, sure=sure)


# --------------------------------------------------------------------------- evaluations


def evaluations(runs: Runs) -> list[dict]:
    """Returns all evaluations of the target agent.

    The key `rewards` of an evaluation is a dict from a task to the rewards of its episodes. If a
    run has no agent named "target", the evaluations of all its agents are returned. Their arms are
    then named "ARM: AGENT".
    """
    evals = []
    for arm, seed, run in each(runs):
        of_run = report.evaluations(run, phases_of(run))
        has_target = any(e["name"] == "target" for e in of_run)
        for e in of_run:
            if has_target and e["name"] != "target":
                continue
            label = arm if has_target else f"{arm}: {e['name']}"
            rewards = report.rewards_by_task(read_jsonl(run / e["output"]))
            evals.append(e | dict(arm=label, seed=seed, finished=is_finished(run),
                                  rewards=rewards))
    return evals


def on_common_tasks(evals: list[dict]) -> tuple[list[dict], list[str]]:
    """Restricts the evaluations of each split to the tasks that all runs have evaluated, and
    computes reward and success on these tasks. Returns the new evaluations, and a note for each
    split in which the runs evaluated different tasks."""
    tasks = defaultdict(dict)  # split -> (arm, seed) -> tasks
    for e in evals:
        tasks[e["split"]][e["arm"], e["seed"]] = {*e["rewards"]}
    notes = []
    common = {}
    for split, by_run in tasks.items():
        common[split] = set.intersection(*by_run.values())
        counts = {arm: len(own) for (arm, _), own in by_run.items() if own != common[split]}
        if counts:
            each = ", ".join(f"{arm} has {count}" for arm, count in counts.items())
            notes.append(f"The evaluated tasks of {split} differ: {each}; the "
                         f"{len(common[split])} that all have are compared.")
    restricted = []
    for e in evals:
        rewards = []
        for task in common[e["split"]]:
            rewards += e["rewards"][task]
        if rewards:
            success = fmean(reward >= SOLVED for reward in rewards)
            restricted.append(e | dict(reward=fmean(rewards), success=success))
    return restricted, notes


def after_the_last(evals: list[dict]) -> list[dict]:
    """Returns the evaluations after the last evaluated iteration of each run."""
    last = {(e["arm"], e["seed"]): e["i"] for e in sorted(evals, key=lambda e: e["i"])}
    return [e for e in evals if e["i"] == last[e["arm"], e["seed"]]]


def last_of_both(evals: list[dict], a: str, b: str) -> list[dict]:
    """Returns the evaluations of the arms a and b after their last iterations. If one of the two
    runs with a seed is unfinished, the evaluations of both are taken after the last iteration that
    both have reached."""
    last = [e for e in after_the_last(evals) if e["arm"] in (a, b)]
    kept = []
    for seed in dict.fromkeys(e["seed"] for e in last):
        i = {e["arm"]: e["i"] for e in last if e["seed"] == seed}
        if not all(e["finished"] for e in last if e["seed"] == seed):
            i = dict.fromkeys(i, min(i.values()))
        kept += [e for e in evals if e["seed"] == seed and e["i"] == i.get(e["arm"])]
    return kept


def values_by_seed(rows: list[dict], key: str, **where) -> dict:
    """Selects the rows whose keys have the values given in `where`. Returns the values of `key` in
    these rows, by seed."""
    return {row["seed"]: row[key] for row in rows if where.items() <= row.items()}


# --------------------------------------------------------------------- costs and explorations


def cost(run: Path) -> dict:
    """Returns the costs of a run after its initial SFT phase: the optimiser steps of the target and
    of all agents, the tokens in the target's training phases, and the number of rollouts. The last
    value, `tasks`, is the size of GRPO's task set at the end, or 0 for methods of coevolve.py."""
    phases = phases_of(run)
    target = training_phases(phases, "target")
    played = [*explorations_in(phases), *target]  # training in `evolve.py` plays episodes, too
    return {"steps of the target": sum(row["steps"] for row in target),
            "steps of all agents": sum(row["steps"] for row in training_phases(phases)),
            "tokens of the target": sum(row.get("tokens", 0) for row in target),
            "rollouts": sum(row.get("episodes", 0) for row in played),
            "tasks": [0, *task_counts(phases)][-1]}


def explored(run: Path, agent: str | None = None) -> list[dict]:
    """Returns the trajectories that the agents of a run explored, or only those of `agent` if it is
    given. Files that were deleted are skipped."""
    rows = []
    for phase in explorations_in(phases_of(run)):
        if agent in (None, phase["name"]):
            rows += rows_in(run / phase["output"])
    return rows


def shares(runs: Runs) -> list[dict]:
    """Returns one row per run and threshold, with the shares of three kinds of explored
    trajectories.

    A success has reward 1. A negative has a reward below the threshold. A hard negative is a
    failure with a reward of at least the threshold. Runs without explored trajectories are skipped.
    """
    rows = []
    for arm, seed, run in each(runs):
        rewards = np.array([row["reward"] for row in explored(run)])
        if not len(rewards):
            continue
        solved = rewards >= SOLVED
        for threshold in THRESHOLDS:
            below = rewards < threshold
            rows.append({"arm": arm, "seed": seed, "threshold": threshold,
                         "success": float(solved.mean()), "negative": float(below.mean()),
                         "hard negative": float((~solved & ~below).mean())})
    return rows


# The agents of the paper's Figure 3: label -> (arm, agent). The figure shows how diverse the
# failures of each agent are. The distance between two failures of the same task is 1 - cos of their
# embeddings.
FIGURE_3 = {"eto": ("eto", "target"), "coevolve: target": ("coevolve", "target"),
            "coevolve: failure": ("coevolve", "failure")}


def distances_of(runs: Runs) -> dict[str, dict[int, dict[str, float]]]:
    """Computes the mean distance between the failures of a task, for each agent of Figure 3.

    Returns distances[label][seed][task], for the seeds that both ETO and co-evolution have. The
    failures are embedded by the SFT agent that both methods start from. Seeds whose SFT agent was
    deleted are skipped.
    """
    found = defaultdict(dict)
    for seed in runs.get("eto", {}).keys() & runs.get("coevolve", {}).keys():
        folder = runs["coevolve"][seed] / "sft-target"
        if folder.is_dir():  # else its checkpoints were deleted
            embed = embedder(folder)
            for name, (arm, agent) in FIGURE_3.items():
                found[name][seed] = distances(explored(runs[arm][seed], agent), embed)
    return found


def distances(rows: list[dict], embed) -> dict[str, float]:
    """Returns the mean cosine distance, 1 - cos, between any two failures of a task, for each task
    with at least two failures. Trajectories without action tokens have no embedding, and are
    skipped."""
    vectors = defaultdict(list)
    for row in rows:
        if row["reward"] < SOLVED and any(row["action_mask"]):
            vectors[row["task"]].append(embed(row))
    return {task: mean_distance(np.stack(of_task)) for task, of_task in vectors.items()
            if len(of_task) > 1}


def mean_distance(vectors: np.ndarray) -> float:
    """Returns the mean of 1 - cos over all pairs of the n >= 2 vectors. `vectors` is (n, d)."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = (unit @ unit.T)[np.triu_indices(len(unit), 1)]
    return float(1 - cosines.mean())


def embedder(folder: Path):
    """Loads the agent in a folder. Returns a function that embeds a trajectory, given as a row of a
    trajectory file. The embedding (d,) is the last hidden state, averaged over the action
    tokens."""
    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = read_model(folder, device=device).base_model.eval()

    @torch.inference_mode()
    def embed(row: dict) -> np.ndarray:
        states = model(input_ids=torch.tensor([row["ids"]], device=device)).last_hidden_state[0]
        return states[torch.tensor(row["action_mask"]) == 1].mean(0).cpu().numpy()    # (d,)

    return embed
