"""The numbers of a report, on `runs`: arm -> seed -> folder."""

import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import transformers

from common.files import read_jsonl
from dpo import better
from engine.models import read_model
from lab.page import report
from lab.runfiles import SOLVED, explorations_in, is_finished, phases_of
from lab.study.methods import Runs, task_counts, trained

# The 97.5% quantiles of Student's t distribution with 1, 2, ... degrees of freedom.
T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010,
     2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930)


def interval(values) -> dict | None:
    """Mean and half the width of its 95% t interval over seeds (None for one; from 20 on that of
    20); None without values."""
    values = np.asarray(list(values), dtype=float)
    n = len(values)
    if n == 0:
        return None
    half = None
    if n > 1:
        half = float(T[min(n, 20) - 2] * values.std(ddof=1) / math.sqrt(n))
    return dict(n=n, mean=float(values.mean()), half=half)


def paired(a: dict[int, float], b: dict[int, float]) -> dict | None:
    """a - b on the seeds that both have: interval, on how many a is ahead, and whether it is sure
    who is: on three or more, and the interval excludes 0."""
    seeds = a.keys() & b.keys()
    found = interval([a[seed] - b[seed] for seed in seeds])
    if found is None:
        return None
    ahead = sum(a[seed] > b[seed] for seed in seeds)
    sure = found["n"] > 2 and abs(found["mean"]) > found["half"]
    return found | dict(ahead=ahead, sure=sure)


# --------------------------------------------------------------------------- evaluations


def evaluations(runs: Runs) -> list[dict]:
    """What there is to say of the target's evaluations, with arm, seed and `episodes_by_task`. Of a
    run without an agent called target all agents are evaluated, as arms "ARM: AGENT"."""
    found = []
    for arm, by_seed in runs.items():
        for seed, run in by_seed.items():
            of_run = report.evaluations(run, phases_of(run))
            has_target = any(e["name"] == "target" for e in of_run)
            for e in of_run:
                if has_target and e["name"] != "target":
                    continue
                of_task = defaultdict(list)  # task -> its episodes: reward, messages
                for row in read_jsonl(run / e["output"]):
                    of_task[row["task"]].append((row["reward"], row.get("messages")))
                label = arm if has_target else f"{arm}: {e['name']}"
                found.append(e | dict(arm=label, seed=seed, finished=is_finished(run),
                                      episodes_by_task=of_task))
    return found


def on_common_tasks(found: list[dict]) -> tuple[list[dict], list[str]]:
    """Return the evaluations on those tasks of a split that all of them have, and for each split
    whose tasks differ a sentence that says so."""
    tasks = {}  # split -> the tasks of each arm
    for e in found:
        tasks.setdefault(e["split"], {})[e["arm"], e["seed"]] = {*e["episodes_by_task"]}
    notes = []
    common = {}
    for split, of_runs in tasks.items():
        common[split] = set.intersection(*of_runs.values())
        counts = {arm: len(some) for (arm, _), some in of_runs.items() if some != common[split]}
        if counts:
            each = ", ".join(f"{arm} has {count}" for arm, count in counts.items())
            notes.append(f"The evaluated tasks of {split} differ: {each}; the "
                         f"{len(common[split])} that all have are compared.")
    made = []
    for e in found:
        of_task = {task: episodes for task, episodes in e["episodes_by_task"].items()
                   if task in common[e["split"]]}
        rewards = [reward for episodes in of_task.values() for reward, _ in episodes]
        if len(of_task) < len(e["episodes_by_task"]) and rewards:
            e = e | dict(reward=fmean(rewards), episodes_by_task=of_task,
                         success=fmean(reward >= SOLVED for reward in rewards))
        if rewards:
            made.append(e)
    return made, notes


def after_the_last(found: list[dict]) -> list[dict]:
    """Of each run the evaluations after its last iteration."""
    last = {(e["arm"], e["seed"]): e["i"] for e in sorted(found, key=lambda e: e["i"])}
    return [e for e in found if e["i"] == last[e["arm"], e["seed"]]]


def last_of_both(found: list[dict], a: str, b: str) -> list[dict]:
    """The evaluations of two arms after their last iterations; on a seed on which one of them has
    not finished, after the last iteration that both have."""
    last = after_the_last(found)
    kept = []
    for seed in dict.fromkeys(e["seed"] for e in last):
        i = {e["arm"]: e["i"] for e in last if e["seed"] == seed and e["arm"] in (a, b)}
        if not all(e["finished"] for e in last if e["seed"] == seed and e["arm"] in (a, b)):
            i = dict.fromkeys(i, min(i.values()))
        kept += [e for e in found if e["seed"] == seed and e["i"] == i.get(e["arm"])]
    return kept


def identical(found: list[dict], a: str, b: str, split: str) -> bool:
    """Return True if two arms played the same episodes of a split on all seeds that both have."""
    of_arms = [{e["seed"]: e["episodes_by_task"] for e in found
                if e["arm"] == arm and e["split"] == split} for arm in (a, b)]
    common = of_arms[0].keys() & of_arms[1].keys()
    return all(of_arms[0][seed] == of_arms[1][seed] for seed in common)


def after_the_best(found: list[dict]) -> list[dict]:
    """Of each run the evaluations after the iteration with the most reward on validation, of equal
    ones the first. Where there are iterations, what SFT made is no choice."""
    best = {}  # (arm, seed) -> its best evaluation on validation
    for e in sorted(found, key=lambda e: e["i"]):
        if e["split"] == "validation":
            before = best.setdefault((e["arm"], e["seed"]), e)
            if before["i"] == 0 or better(e["reward"], before["reward"]):
                best[e["arm"], e["seed"]] = e
    chosen = {run: e["i"] for run, e in best.items()}
    return [e for e in found
            if e["split"] != "validation" and e["i"] == chosen.get((e["arm"], e["seed"]))]


def of_seeds(found: list[dict], key: str, **where) -> dict[int, float]:
    """seed -> a number of those evaluations where all of this is so."""
    return {e["seed"]: e[key] for e in found if where.items() <= e.items()}


# --------------------------------------------------------------------- costs and explorations


def cost(run: Path) -> dict:
    """What a run took after the first SFT, and the tasks that evolution ended with."""
    phases = phases_of(run)
    target = trained(phases, "target")
    played = [*explorations_in(phases), *target]  # by `evolve.py` while it trains
    return {"steps of the target": sum(row["steps"] for row in target),
            "steps of all agents": sum(row["steps"] for row in trained(phases)),
            "tokens of the target": sum(row.get("tokens", 0) for row in target),
            "rollouts": sum(row.get("episodes", 0) for row in played),
            "tasks": [0, *task_counts(phases)][-1]}


def explored(run: Path, agent: str | None = None) -> list[dict]:
    """All explored trajectories of a run, or one agent's, as far as the files are there."""
    rows = []
    for e in explorations_in(phases_of(run)):
        if agent in (None, e["name"]) and (run / e["output"]).is_file():
            rows += read_jsonl(run / e["output"])
    return rows


def explored_alike(runs: Runs, a: str, b: str) -> bool:
    """Return True if two arms explored the same episodes on all seeds that both have."""
    texts = []
    for arm in a, b:
        texts.append({seed: [(row["task"], row["reward"], row.get("messages"))
                             for row in explored(run)]
                      for seed, run in runs.get(arm, {}).items()})
    return all(texts[0][seed] == texts[1][seed] for seed in texts[0].keys() & texts[1].keys())


def shares(runs: Runs, threshold: float) -> list[dict]:
    """Of what each run has explored, if anything, the shares of successes, of rewards below the
    threshold, and of failures from there on."""
    found = []
    for arm, by_seed in runs.items():
        for seed, run in by_seed.items():
            rewards = np.array([row["reward"] for row in explored(run)])
            if not len(rewards):
                continue
            solved = rewards >= SOLVED
            below = rewards < threshold
            of_run = {"success": solved, "negative": below, "hard negative": ~solved & ~below}
            found.append(dict(arm=arm, seed=seed, threshold=threshold))
            found[-1] |= {name: float(np.mean(each)) for name, each in of_run.items()}
    return found


# Figure 3: how much the failures of an instruction differ, 1 - cos of their embeddings.
FIGURE_3 = {"eto": ("eto", "target"), "coevolve: target": ("coevolve", "target"),
            "coevolve: failure": ("coevolve", "failure")}


def distances_of(runs: Runs) -> dict[str, dict[int, dict[str, float]]]:
    """agent -> seed -> task -> distance of its failures, over the seeds that ETO and co-evolution
    both have; embedded by the SFT agent that both start from."""
    found = defaultdict(dict)
    for seed in runs.get("eto", {}).keys() & runs.get("coevolve", {}).keys():
        folder = runs["coevolve"][seed] / "sft-target"
        if folder.is_dir():  # else its checkpoints were deleted
            embed = embedder(folder)
            for name, (arm, agent) in FIGURE_3.items():
                found[name][seed] = distances(explored(runs[arm][seed], agent), embed)
    return found


def distances(rows: list[dict], embed) -> dict[str, float]:
    """The mean pairwise distance of each instruction's failures, where it has two at least."""
    vectors = defaultdict(list)
    for row in rows:
        if row["reward"] < SOLVED and any(row["action_mask"]):
            vectors[row["task"]].append(embed(row))
    found = {}
    for task, of_task in vectors.items():
        if len(of_task) > 1:
            found[task] = mean_distance(np.stack(of_task))
    return found


def mean_distance(vectors: np.ndarray) -> float:
    """Mean over all pairs of 1 - cos, of vectors (n, d), n >= 2."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = (unit @ unit.T)[np.triu_indices(len(unit), 1)]
    return float(1 - cosines.mean())


def embedder(folder: Path):
    """embed(row of a trajectory) -> (d,), the mean of the last layer's hidden states, of the agent
    in a folder, over the action tokens."""
    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = read_model(folder, device=device).base_model.eval()

    @torch.inference_mode()
    def embed(row: dict) -> np.ndarray:
        states = model(input_ids=torch.tensor([row["ids"]], device=device)).last_hidden_state[0]
        return states[torch.tensor(row["action_mask"]) == 1].mean(0).cpu().numpy()    # (d,)

    return embed
