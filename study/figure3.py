"""Figure 3: how much the failures of an instruction differ, 1 - cos of their embeddings."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from engine.packing import pack
from engine.ranks import fill
from envs import SUCCESS
from harness.settings import SettingsError
from study.numbers import explored, paired

TOKENS = 4096  # in one forward pass; more are no faster
SFT = "sft"    # the SFT agent as encoder


def distances_of(runs: dict, encoder: str) -> tuple[dict, dict | None]:
    """Distances of each instruction's failures: agent -> seed -> task -> distance, over the seeds
    that ETO and co-evolution both have; and the failure agent's minus ETO's.

    These two are compared on the instructions on which both failed twice or more: elsewhere the
    one's are the harder ones.
    """
    agents = {"ETO": ("eto", "target"), "co-evolution: target": ("coevolve", "target"),
              "co-evolution: failure agent": ("coevolve", "failure")}
    found = {name: {} for name in agents}
    for seed in sorted(runs.get("eto", {}).keys() & runs.get("coevolve", {}).keys()):
        # One encoder for both: the SFT agent, from which both methods start on this seed.
        embed = embedder(runs["coevolve"][seed] / "sft-target", encoder)
        for name, (method, agent) in agents.items():
            if of_tasks := distances(explored(runs[method][seed], agent), embed):
                found[name][seed] = of_tasks
    eto, failure = found["ETO"], found["co-evolution: failure agent"]
    shared = {seed: [failure[seed][task] - eto[seed][task]
                     for task in eto[seed].keys() & failure[seed].keys()]
              for seed in eto.keys() & failure.keys()}
    means = {seed: float(np.mean(found)) for seed, found in shared.items() if found}
    return ({name: by_seed for name, by_seed in found.items() if by_seed},
            paired(means, dict.fromkeys(means, 0.0)))


def distances(rows: list, embed) -> dict[str, float]:
    """The mean pairwise distance of each instruction's failures, where it has two at least."""
    by_task = {}
    for row in rows:
        if row.reward < SUCCESS and any(row.action_mask):
            by_task.setdefault(row.task, []).append(row)
    by_task = {task: found for task, found in by_task.items() if len(found) > 1}
    vectors = iter(embed([row for found in by_task.values() for row in found]))
    return {task: mean_distance(np.stack([next(vectors) for _ in found]))
            for task, found in by_task.items()}


def mean_distance(vectors: np.ndarray) -> float:
    """Mean over all pairs of 1 - cos, of vectors (n, d), n >= 2."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = (unit @ unit.T)[np.triu_indices(len(unit), 1)]
    return float(1 - cosines.mean())


# ------------------------------------------------------------------------------- embeddings


def embedder(policy: Path, encoder: str):
    """A function from n trajectories to n embeddings (d,): the last layer's mean hidden states.

    SFT: `policy` reads its own tokens, and the mean is over action tokens; else an encoder of this
    hub name reads the conversation as text, and the mean is over all tokens.
    """
    disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if encoder != SFT:
        model = AutoModel.from_pretrained(encoder, dtype=dtype).to(device).eval()
        return partial(read_texts, model, AutoTokenizer.from_pretrained(encoder))
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=dtype, attn_implementation="ragged")
    return partial(read_actions, model.base_model.to(device).eval())


@torch.inference_mode()
def read_actions(model, rows: list) -> list[np.ndarray]:
    """Many trajectories a pass, no padding; those of an instruction share their beginning."""
    found = []
    for batch in fill(rows, TOKENS, lambda row: len(row.ids)):
        packed = pack(batch, model.device)
        states = model(input_ids=packed.ids, position_ids=packed.positions, use_cache=False,
                       **packed.attention).last_hidden_state[0]                      # (N, d)
        if "rows" in packed.attention:
            states = states.index_select(0, packed.attention["rows"])                # (M, d)
        for row, own in zip(batch, states.split([len(row.ids) for row in batch])):   # (l, d)
            action = torch.tensor(row.action_mask, dtype=torch.bool, device=own.device)
            found.append(own[action].float().mean(0).cpu().numpy())
    return found


@torch.inference_mode()
def read_texts(model, tokenizer, rows: list) -> list[np.ndarray]:
    """One conversation a pass, since lengths differ."""
    limit = min(getattr(model.config, "max_position_embeddings", 10 ** 9),
                tokenizer.model_max_length, 10 ** 9)  # the first holds some it cannot use
    found = []
    for row in rows:
        ids = tokenizer("\n".join(m["content"] for m in row.messages), truncation=True,
                        max_length=limit, return_tensors="pt").input_ids             # (1, l)
        states = model(input_ids=ids.to(model.device)).last_hidden_state             # (1, l, d)
        found.append(states[0].float().mean(0).cpu().numpy())
    return found


def check_encoder(hub_name: str) -> None:
    """SettingsError, before any run, unless the encoder's configuration and tokenizer are there."""
    try:
        AutoConfig.from_pretrained(hub_name), AutoTokenizer.from_pretrained(hub_name)
    except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
        problem = str(error).strip().splitlines() or [type(error).__name__]
        raise SettingsError(f"--encoder {hub_name}: {problem[0]}; give a hub name within reach, or "
                            "a folder") from None
