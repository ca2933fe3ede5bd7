"""Passes: which trajectories a model reads in one forward, and on which rank. Nothing depends on
it but time, and rounding.

`Run.log_probs` calls `distributed_log_probs`, or on a CPU `engine.prefix_sharing`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dpo import Trajectory, in_fp32, token_log_probs

LIMITS = 64   # sizes of passes that are tried where ranks share them [ours]
FLOOR = 1024  # tokens: a pass of fewer hardly takes less time than one of so many [ours]
Pass = list[int]  # of which trajectories it is, by their places; the longest is the first


def distributed_log_probs(
    accelerator,
    model,
    trajectories: list[Trajectory],
    tokens: int,
    logits_processor: Callable = in_fp32,
) -> Tensor:
    """Computes `token_log_probs` of many trajectories, by several passes that the ranks share.

    Args:
        accelerator: accelerate's, which knows ranks, device and precision.
        model: One that is whole on each rank, or in parts over all (FSDP2).
        trajectories: The same ones on all ranks.
        tokens: Of a pass at most, with padding; 0: each trajectory is a pass of its own.
        scores: What pi is, as in `dpo.token_log_probs`.

    Returns:
        (A,) nats, the same ones on all ranks. Gradients flow into the rank's own passes.
    """
    rank = accelerator.process_index
    ranks = accelerator.num_processes
    device = accelerator.device
    lengths = [len(t.ids) for t in trajectories]
    found = [torch.zeros(t.action_count, device=device) for t in trajectories]
    bf16 = accelerator.mixed_precision == "bf16" and not isinstance(model, FSDPModule)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        for passes in schedule_rounds(lengths, tokens, ranks):
            # All ranks have to meet in a pass. One without work repeats a text, and forgets it.
            works = rank < len(passes)
            places = passes[rank] if works else passes[-1][-1:]
            some = [trajectories[place] for place in places]
            values = int(works) * token_log_probs(model, some, logits_processor)
            parts = values.split([t.action_count for t in some])
            for place, part in zip(places, parts):
                found[place] = found[place] + part
    mine = torch.cat(found)                                                       # (A,)
    if ranks == 1:
        return mine

    # The value is the sum over ranks: each has filled in what it has run, and left the rest 0. The
    # gradient is that of this rank's passes, times `ranks`, since the optimiser loop and FSDP
    # average gradients over ranks, where the loss asks for their sum.
    value = accelerator.reduce(mine.detach())
    gradient = ranks * (mine - mine.detach())  # zeros, whose gradient counts
    return value + gradient


def fits_in_round(trajectories: list[Trajectory], tokens: int, ranks: int) -> bool:
    """Returns True if trajectories need at most one forward pass on each rank, of at most `tokens`
    tokens. `schedule_rounds` never chooses rounds that keep more in a rank's memory than this round."""
    return len(batch_by_length([len(t.ids) for t in trajectories], tokens)) <= ranks


def schedule_rounds(lengths: list[int], tokens: int, ranks: int) -> list[list[Pass]]:
    """Shares trajectories among ranks. In each round every rank runs one pass, and waits for the
    slowest.

    Args:
        lengths: The tokens of each trajectory, (T,).
        tokens: Of a pass at most, with padding; 0: each trajectory is a pass of its own.
        ranks: How many passes run at the same time.

    Returns:
        Rounds of at most `ranks` passes.
    """
    if ranks == 1:
        return [[one] for one in batch_by_length(lengths, tokens)]

    # Large passes are best for each rank, but where some are left over the others idle.
    best = []
    least = math.inf
    for part in range(LIMITS, 0, -1):
        passes = batch_by_length(lengths, tokens * part / LIMITS)
        passes.sort(key=lambda one: cost(one, lengths), reverse=True)
        rounds = []
        time = 0
        for first in range(0, len(passes), ranks):
            rounds.append(passes[first:first + ranks])
            time += max(FLOOR, cost(passes[first], lengths))
        if time < least:
            best = rounds
            least = time
    return best


def cost(one: Pass, lengths: list[int]) -> int:
    """The tokens of a pass with padding, in which all rows are as long as the longest."""
    return len(one) * lengths[one[0]]


def batch_by_length(lengths: list[int], limit: float) -> list[Pass]:
    """Passes that cost at most so many tokens, or are of one trajectory that has more. The longest
    come first, so that those of a pass are of like length and little is padded."""
    passes = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if not passes or cost(passes[-1], lengths) + lengths[passes[-1][0]] > limit:
            passes.append([])
        passes[-1].append(place)
    return passes
