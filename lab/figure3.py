"""Figure 3: how much the failures of an instruction differ, 1 - cos of their embeddings."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

import dpo
from lab.study_numbers import explored
from worlds import World

AGENTS = {"ETO": ("eto", "target"), "co-evolution: target": ("coevolve", "target"),
          "co-evolution: failure agent": ("coevolve", "failure")}


def distances_of(runs: dict) -> dict[str, dict[int, dict[str, float]]]:
    """Distances of each instruction's failures, agent -> seed -> task -> distance, over the seeds
    that ETO and co-evolution both have. Both are embedded by the SFT agent that they start from."""
    found = defaultdict(dict)
    for seed in sorted(runs.get("eto", {}).keys() & runs.get("coevolve", {}).keys()):
        folder = runs["coevolve"][seed] / "sft-target"
        if folder.is_dir():  # else its checkpoints were deleted
            embed = embedder(folder)
            for name, (method, agent) in AGENTS.items():
                found[name][seed] = distances(explored(runs[method][seed], agent), embed)
    return found


def distances(rows: list[dict], embed) -> dict[str, float]:
    """The mean pairwise distance of each instruction's failures, where it has two at least."""
    vectors = defaultdict(list)
    for row in rows:
        if row["reward"] < World.success and any(row["action_mask"]):
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
