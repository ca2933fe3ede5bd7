"""Computes the numbers of a report on several runs.

A row is a dict with the arm and the seed of a run, and with measures such as `reward`. A measure is
a list with one entry for each environment, usually only one. An entry is an array with one value
per task, (N,), or a number. The value of a measure is the mean over environments of the means over
tasks.
"""

import itertools
import math
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import torch
import transformers

from common.settings import UsageError
from engine.models import read_model
from lab.chat import evaluate
from lab.page.report import bootstrap, rewards_by_task
from lab.runfiles import (
    SOLVED,
    config_of,
    evaluations_in,
    explorations_in,
    phases_of,
    rows_in,
)
from lab.study.methods import Runs, each, is_target, training_phases

MEASURES = ["reward", "success"]
THRESHOLDS = (0.6, 0.7, 0.8)  # minimum rewards of a hard negative [Table 2]
SHARES = ["success", "negative", "hard negative"]
COSTS = ["steps of the target", "steps of all agents", "tokens of the target", "rollouts"]

# ---------------------------------------------------------------------------- statistics


def grouped(rows: list[dict], keys: list[str]) -> dict[tuple, dict]:
    """Groups rows by arm and by the values of the keys. Returns {(arm, values): {seed: row}}."""
    groups = defaultdict(dict)
    for row in rows:
        groups[row["arm"], tuple(row[key] for key in keys)][row["seed"]] = row
    return groups


def single(rows: list[dict], keys: list[str]) -> list[tuple]:
    """Returns a list of (arm, values of the keys, group). The group contains a tuple (row,) for
    each seed."""
    return [(arm, values, [*zip(by_seed.values())])
            for (arm, values), by_seed in grouped(rows, keys).items()]


def paired(rows: list[dict], compared: list[tuple[str, str]], keys: list[str]) -> list[tuple]:
    """Returns a list of ("a - b", values of the keys, group) for compared arms (a, b). The group
    contains a tuple (row of a, row of b) for each common seed."""
    groups = grouped(rows, keys)
    every = dict.fromkeys(values for _, values in groups)
    result = []
    for (a, b), values in itertools.product(compared, every):
        of_a, of_b = groups[a, values], groups[b, values]
        group = [(of_a[seed], of_b[seed]) for seed in of_a if seed in of_b]
        if group:
            result.append((f"{a} - {b}", values, group))
    return result


def text_of(key: str, group: list[tuple]) -> str:
    """Returns the values of a key in a group, as text. Different values in the rows of a seed are
    joined with " - "."""
    texts = {}
    for rows in group:
        texts[" - ".join(dict.fromkeys(str(row[key]) for row in rows))] = None
    return ", ".join(texts)


def interval(group: list[tuple], measure: str) -> dict:
    """Computes the mean over seeds of a measure or of its differences, and the 95% intervals.

    Args:
        group: The rows of an arm, or of a pair of arms (see `single` and `paired`).

    Returns:
        A dict with the number of seeds `n`, the `mean`, and `half`, which is half the width of the
        t interval over seeds. One seed has no t interval, so `half` is None. If the measure has one
        value per task, `low` and `high` are the bounds of the `bootstrap` interval. Differences are
        computed per task, so both arms use the same tasks in each of its samples. For a difference,
        `ahead` is the number of seeds with a larger value in the first arm.
    """
    values = []
    for row, *others in group:
        value = row[measure]
        for other in others:
            value = [x - y for x, y in zip(value, other[measure])]
        values.append(value)
    n = len(values)
    means = np.array([value_of(value) for value in values])
    half = None
    if n > 1:
        half = float(t_quantile(n - 1) * means.std(ddof=1) / math.sqrt(n))
    result = dict(n=n, mean=float(means.mean()), half=half)
    if np.ndim(values[0][0]):
        result |= bootstrap(values)
    if others:
        result["ahead"] = int((means > 1e-9).sum())
    return result


def value_of(measure: list) -> float:
    return float(np.mean([np.mean(entry) for entry in measure]))


@cache
def t_distribution(df: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a grid of values t of Student's t distribution with `df` degrees of freedom, and the
    probability P(|T| > t) of each. T is sqrt(df) tan(A), where the angle A has a density that is
    proportional to cos(A)^(df - 1)."""
    angles = np.linspace(0, np.pi / 2, 100_001)
    density = np.cos((angles[1:] + angles[:-1]) / 2) ** (df - 1)
    beyond = density[::-1].cumsum()[::-1]
    return math.sqrt(df) * np.tan(angles[:-1]), beyond / beyond[0]


def t_quantile(df: int) -> float:
    """Returns the 97.5% quantile of Student's t distribution."""
    t, p = t_distribution(df)
    return np.interp(0.05, p[::-1], t[::-1])


def p_value(lead: dict) -> float:
    """Returns the p-value of a paired t-test over seeds. `lead` is a difference that `interval`
    returned."""
    df = lead["n"] - 1
    standard_error = lead["half"] / t_quantile(df)
    return float(np.interp(abs(lead["mean"]) / max(standard_error, 1e-12), *t_distribution(df)))


def holm(p_values: list[float]) -> list[float]:
    """Returns the p-values, corrected for multiple tests with Holm's method, in the same order."""
    p = np.array(p_values)
    order = p.argsort()
    p[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return p.clip(max=1).tolist()


# --------------------------------------------------------------------------- evaluations


def evaluation_rows(runs: Runs) -> list[dict]:
    """Returns a row for each evaluation of an agent, with the measures `reward` and `success`.

    `agent` is "target" for the target (see `runfiles.target_of`), and otherwise the agent's name.

    Raises UsageError if two runs evaluate different tasks of a split, because differences between
    runs are computed task by task.
    """
    rows = []
    first = {}  # split -> (the first file of its evaluations, the tasks in this file)
    for arm, seed, run in each(runs):
        phases = phases_of(run)
        for phase in evaluations_in(phases):
            file = run / phase["output"]
            rewards = rewards_by_task(rows_in(file))
            if not rewards:  # the split has no tasks, or the user has deleted or emptied the file
                continue
            split = phase["split"]
            tasks = sorted(rewards)
            other, others = first.setdefault(split, (file, tasks))
            if tasks != others:
                raise UsageError(f"{file} has {len(tasks)} tasks, which are not the {len(others)} "
                                 f"of {other}; compare runs with the same --eval-tasks")
            by_task = [np.array(rewards[task]) for task in tasks]
            rows.append(dict(
                arm=arm, seed=seed, split=split, iteration=phase["i"], file=file,
                agent="target" if is_target(phase, phases) else phase["name"],
                sampling=sampling(config_of(run)["settings"], len(by_task[0])),
                reward=[np.array([of_task.mean() for of_task in by_task])],
                success=[np.array([(of_task >= SOLVED).mean() for of_task in by_task])]))
    return rows


def sampling(settings: dict, rollouts: int) -> str:
    """Describes how the episodes of an evaluation were sampled, for example "temperature 0.7, 5
    rollouts". Training methods always evaluate with greedy decoding, whatever --temperature is."""
    temperature = settings["temperature"] if settings["method"] in evaluate.METHODS else 0
    text = f"temperature {temperature}" if temperature else "greedy"
    return f"{text}, {rollouts} rollouts" if rollouts > 1 else text


def after_the_last(evals: list[dict]) -> list[dict]:
    """Returns, for each run, each agent's last evaluation on each split."""
    last = {}
    for e in sorted(evals, key=lambda e: e["iteration"]):
        last[e["arm"], e["agent"], e["split"], e["seed"]] = e
    return [*last.values()]


def average(of_envs: list[list[dict]]) -> list[dict]:
    """Averages the last evaluations of each environment over the environments. A combination of
    arm, agent, split and seed is left out if an environment lacks it."""
    same = defaultdict(list)
    for e in itertools.chain(*of_envs):
        same[e["arm"], e["agent"], e["split"], e["seed"]].append(e)
    rows = []
    for evals in same.values():
        if len(evals) == len(of_envs):
            row = dict(evals[0], iteration="/".join(str(e["iteration"]) for e in evals))
            for measure in MEASURES:
                row[measure] = [e[measure][0] for e in evals]
            rows.append(row)
    return rows


# --------------------------------------------------------------------- costs and explorations


def costs(runs: Runs) -> list[dict]:
    """Returns one row per run, with its costs after the initial SFT phase (see `COSTS`)."""
    rows = []
    for arm, seed, run in each(runs):
        phases = phases_of(run)
        trained = training_phases(phases)
        target = [row for row in trained if is_target(row, phases)]
        played = [*explorations_in(phases), *target]  # training in `evolve.py` also plays episodes
        values = (sum(row["steps"] for row in target), sum(row["steps"] for row in trained),
                  sum(row.get("tokens", 0) for row in target),
                  sum(row.get("episodes", 0) for row in played))
        rows.append(dict(arm=arm, seed=seed) | {name: [n] for name, n in zip(COSTS, values)})
    return rows


def explored(run: Path, agent: str = "") -> list[dict]:
    """Returns the trajectories of a run's exploration phases, by all agents or only by `agent`."""
    rows = []
    for phase in explorations_in(phases_of(run)):
        if agent in ("", phase["name"]):
            rows += rows_in(run / phase["output"])
    return rows


def shares(runs: Runs) -> list[dict]:
    """Returns one row per run and threshold, with the shares of three kinds of explored
    trajectories.

    A success has reward 1. A hard negative is a failure with a reward of at least the threshold.
    Any other failure is a negative. Runs without explored trajectories are skipped.
    """
    rows = []
    for arm, seed, run in each(runs):
        rewards = np.array([row["reward"] for row in explored(run)])
        if not len(rewards):
            continue
        solved = rewards >= SOLVED
        for threshold in THRESHOLDS:
            below = rewards < threshold
            values = solved, below, ~solved & ~below
            rows.append(dict(arm=arm, seed=seed, threshold=threshold)
                        | {name: [kind.mean()] for name, kind in zip(SHARES, values)})
    return rows


# The agents of the paper's Figure 3: label -> (arm, agent). The figure shows how diverse the
# failures of each agent are. The distance between two failures of the same task is 1 - cos of their
# embeddings.
FIGURE_3 = {"eto": ("eto", "target"), "coevolve: target": ("coevolve", "target"),
            "coevolve: failure": ("coevolve", "failure")}


def distances_of(runs: Runs) -> list[dict]:
    """Computes the mean distance between the failures of a task, for each agent in Figure 3.

    Returns one row per agent and seed. In a row, `arm` is the agent's label, and `distance` is the
    mean over the tasks in which each of the agents failed at least twice. The failures are embedded
    by the SFT agent that ETO and co-evolution start from. Seeds whose SFT agent was deleted are
    skipped.
    """
    rows = []
    for seed in runs.get("eto", {}).keys() & runs.get("coevolve", {}).keys():
        folder = runs["coevolve"][seed] / "sft-target"
        if not folder.is_dir():
            continue
        embed = embedder(folder)
        found = {}  # label -> {task: distance}
        for label, (arm, agent) in FIGURE_3.items():
            found[label] = distances(explored(runs[arm][seed], agent), embed)
        tasks = set.intersection(*map(set, found.values()))
        for label, by_task in found.items():
            if tasks:
                mean = np.mean([by_task[task] for task in tasks])
                rows.append(dict(arm=label, seed=seed, distance=[mean]))
    return rows


def distances(rows: list[dict], embed) -> dict[str, float]:
    """Returns the mean cosine distance, 1 - cos, between any two failures of a task, for each task
    with at least two failures. Trajectories without action tokens are skipped."""
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
    """Returns a function that embeds a row of a trajectory file with the agent in a folder. The
    embedding (d,) is the last hidden state, averaged over the action tokens."""
    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = read_model(folder, device=device).base_model.eval()

    @torch.inference_mode()
    def embed(row: dict) -> np.ndarray:
        states = model(input_ids=torch.tensor([row["ids"]], device=device)).last_hidden_state[0]
        return states[torch.tensor(row["action_mask"]) == 1].mean(0).cpu().numpy()    # (d,)

    return embed
