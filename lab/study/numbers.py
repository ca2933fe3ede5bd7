"""The numbers of a report, on `runs`: method -> seed -> folder."""

import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

import dpo
from common.files import read_jsonl
from lab.runfiles import explorations, kept_of, of, phases_of, success_of
from lab.study.methods import task_counts, trained

# The 97.5% quantiles of Student's t distribution with 1, 2, ... degrees of freedom.
T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010,
     2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930)


def interval(values) -> dict | None:
    """Mean and half the width of its 95% t interval over seeds (None for one; from 20 on that of
    20); None without values."""
    values = np.asarray(list(values), dtype=float)
    if not (n := len(values)):
        return None
    half = float(T[min(n, 20) - 2] * values.std(ddof=1) / math.sqrt(n)) if n > 1 else None
    return dict(n=n, mean=float(values.mean()), half=half)


def paired(a: dict[int, float], b: dict[int, float]) -> dict | None:
    """a - b on the seeds that both have: interval, on how many a is ahead, and whether it is sure
    who is: on three or more, and the interval excludes 0."""
    seeds = sorted(a.keys() & b.keys())
    if not (found := interval([a[s] - b[s] for s in seeds])):
        return None
    return dict(found, ahead=sum(a[s] > b[s] for s in seeds),
                sure=found["n"] > 2 and abs(found["mean"]) > found["half"])


def evaluations(runs: dict) -> list[dict]:
    """The target's evaluations whose files are there, with method and seed; of a run in its order.
    Reward and success are those of the file."""
    found = []
    for method, by_seed in runs.items():
        for seed, path in by_seed.items():
            success = success_of(path)
            for e in of(kept_of(path), "evaluate"):
                if e["name"] == "target":
                    rewards = np.array([t["reward"] for t in read_jsonl(path / e["output"])])
                    if not rewards.size:  # nothing was played, or somebody has emptied it
                        continue
                    found.append(dict(method=method, seed=seed, i=e["i"], split=e["split"],
                                      reward=float(rewards.mean()),
                                      success=float((rewards >= success).mean())))
    return found


def last(rows: list[dict], key: str, **where) -> dict[int, float]:
    """seed -> the last of some evaluations."""
    return {e["seed"]: e[key] for e in rows if where.items() <= e.items()}


def cost(run: Path) -> dict:
    """What a run took after the first SFT, and the tasks that evolution ended with. The tokens are
    None where they were not counted, as in the plain core."""
    phases = kept_of(run)
    target = trained(phases, "target")
    tokens = None
    if all("tokens" in e for e in target if e["steps"]):
        tokens = sum(e.get("tokens", 0) for e in target)
    return dict(steps_of_the_target=sum(e["steps"] for e in target),
                steps_of_all_agents=sum(e["steps"] for e in trained(phases)),
                tokens_of_the_target=tokens,
                rollouts=sum(e["episodes"] for e in explorations(phases))
                + sum(e.get("episodes", 0) for e in target),  # of `evolve.py`
                tasks=(task_counts(phases) or [0])[-1])


def hard_negatives(run: Path) -> float:
    """The share of hard negatives in what the failure agent explored once it had been trained."""
    return float(np.mean([e["hard"] for e in explorations(phases_of(run))
                          if e["name"] == "failure" and e["i"] > 1]))


def explored(run: Path, agent: str | None = None) -> list[dict]:
    """All explored trajectories of a run, or one agent's."""
    return [row for e in explorations(kept_of(run)) if agent in (None, e["name"])
            for row in read_jsonl(run / e["output"])]


def share(rewards: dict[int, list[float]], low: float, high: float) -> dict[int, float]:
    """seed -> the share of rewards from `low` to below `high`."""
    return {seed: float(np.mean([low <= r < high for r in found]))
            for seed, found in rewards.items()}


# Figure 3: how much the failures of an instruction differ, 1 - cos of their embeddings.
FIGURE_3 = {"ETO": ("eto", "target"), "co-evolution: target": ("coevolve", "target"),
            "co-evolution: failure agent": ("coevolve", "failure")}


def distances_of(runs: dict) -> dict[str, dict[int, dict[str, float]]]:
    """agent -> seed -> task -> distance of its failures, over the seeds that ETO and co-evolution
    both have; embedded by the SFT agent that both start from."""
    found = defaultdict(dict)
    for seed in sorted(runs.get("eto", {}).keys() & runs.get("coevolve", {}).keys()):
        folder = runs["coevolve"][seed] / "sft-target"
        if folder.is_dir():  # else its checkpoints were deleted
            embed = embedder(folder)
            for name, (method, agent) in FIGURE_3.items():
                found[name][seed] = distances(
                    explored(runs[method][seed], agent), embed, success_of(runs[method][seed]))
    return found


def distances(rows: list[dict], embed, success: float) -> dict[str, float]:
    """The mean pairwise distance of each instruction's failures, where it has two at least."""
    vectors = defaultdict(list)
    for row in rows:
        if row["reward"] < success and any(row["action_mask"]):
            vectors[row["task"]].append(embed(row))
    return {task: mean_distance(np.stack(found)) for task, found in vectors.items()
            if len(found) > 1}


def mean_distance(vectors: np.ndarray) -> float:
    """Mean over all pairs of 1 - cos, of vectors (n, d), n >= 2."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = (unit @ unit.T)[np.triu_indices(len(unit), 1)]
    return float(1 - cosines.mean())


def embedder(folder: Path):
    """embed(row of a trajectory) -> (d,), the mean of the last layer's hidden states, of the agent
    in a folder, over the action tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = dpo.read_model(folder, device=device).base_model.eval()

    @torch.inference_mode()
    def embed(row: dict) -> np.ndarray:
        states = model(input_ids=torch.tensor([row["ids"]], device=device)).last_hidden_state[0]
        return states[torch.tensor(row["action_mask"]) == 1].mean(0).cpu().numpy()    # (d,)

    return embed
