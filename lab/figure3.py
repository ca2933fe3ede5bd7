"""Figure 3: how much the failures of an instruction differ, 1 - cos of their embeddings."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

import dpo
from lab.study_numbers import explored, paired
from worlds import World

TOKENS = 4096  # in one forward pass; more are no faster


def distances_of(runs: dict) -> tuple[dict, dict | None]:
    """Distances of each instruction's failures: agent -> seed -> task -> distance, over the seeds
    that ETO and co-evolution both have; and the failure agent's minus ETO's, where both failed
    twice or more."""
    agents = {"ETO": ("eto", "target"), "co-evolution: target": ("coevolve", "target"),
              "co-evolution: failure agent": ("coevolve", "failure")}
    found = {name: {} for name in agents}
    for seed in sorted(runs.get("eto", {}).keys() & runs.get("coevolve", {}).keys()):
        # One encoder for both: the SFT agent, from which both methods start on this seed.
        folder = runs["coevolve"][seed] / "sft-target"
        if not folder.is_dir():  # its checkpoints were deleted
            continue
        embed = Embedder(folder)
        for name, (method, agent) in agents.items():
            if of_tasks := distances(explored(runs[method][seed], agent), embed):
                found[name][seed] = of_tasks
    eto, failure = found["ETO"], found["co-evolution: failure agent"]
    means = {seed: float(np.mean([failure[seed][task] - eto[seed][task] for task in shared]))
             for seed in eto.keys() & failure.keys()
             if (shared := eto[seed].keys() & failure[seed].keys())}
    return ({name: by_seed for name, by_seed in found.items() if by_seed},
            paired(means, dict.fromkeys(means, 0.0)))


def distances(rows: list, embed) -> dict[str, float]:
    """The mean pairwise distance of each instruction's failures, where it has two at least."""
    by_task = defaultdict(list)
    for row in rows:
        if row.reward < World.success and any(row.action_mask):
            by_task[row.task].append(row)
    several = {task: found for task, found in by_task.items() if len(found) > 1}
    vectors = iter(embed(sum(several.values(), [])))
    return {task: mean_distance(np.stack([next(vectors) for _ in found]))
            for task, found in several.items()}


def mean_distance(vectors: np.ndarray) -> float:
    """Mean over all pairs of 1 - cos, of vectors (n, d), n >= 2."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = (unit @ unit.T)[np.triu_indices(len(unit), 1)]
    return float(1 - cosines.mean())


class Embedder:
    """The agent in a folder; of n trajectories the n means (d,) of its last layer's hidden states
    over their action tokens."""

    def __init__(self, folder: Path):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = dpo.read_model(folder, dtype, device).base_model.eval()

    @torch.inference_mode()
    def __call__(self, rows: list) -> list[np.ndarray]:
        """In passes of at most TOKENS with padding, which stands on the right, behind all."""
        found, longest = {}, sorted(range(len(rows)), key=lambda n: -len(rows[n].ids))
        for ns in dpo.fill(longest, TOKENS, lambda ns: len(ns) * len(rows[ns[0]].ids)):
            length = len(rows[ns[0]].ids)
            ids = torch.tensor([rows[n].ids + [0] * (length - len(rows[n].ids)) for n in ns],
                               device=self.model.device)                            # (B, L)
            states = self.model(input_ids=ids, use_cache=False).last_hidden_state   # (B, L, d)
            for n, own in zip(ns, states):
                acts = torch.tensor(rows[n].action_mask, dtype=torch.bool, device=own.device)
                found[n] = own[:len(acts)][acts].float().mean(0).cpu().numpy()      # (d,)
        return [found[n] for n in range(len(rows))]
