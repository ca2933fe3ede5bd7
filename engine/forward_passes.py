"""Forward passes: packs trajectories into padded batches, and distributes these over the ranks.

The schedule affects only the running time and rounding. `Run.log_probs` calls
`distributed_log_probs`, or `engine.prefix_sharing` on a CPU.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from dpo import Trajectory, in_fp32, token_log_probs

CANDIDATES = 64  # number of token limits that `schedule_rounds` tries [ours]
MIN_COST = 1024  # tokens; a forward pass with fewer tokens takes about as long [ours]
Pass = list[int]  # the indices of the trajectories in a forward pass, the longest one first


def distributed_log_probs(
    accelerator,
    model,
    trajectories: list[Trajectory],
    tokens: int,
    logits_processor: Callable = in_fp32,
) -> Tensor:
    """Computes `dpo.token_log_probs` of many trajectories in forward passes on all ranks.

    Args:
        accelerator: The Accelerator, which has the ranks, the device and the precision.
        model: A causal language model, either a full copy on each rank or sharded by FSDP2.
        trajectories: The trajectories, the same on all ranks.
        tokens: The maximum number of tokens in a forward pass, padding included. If it is 0, each
            trajectory gets its own pass.
        logits_processor: The same function as in `dpo.token_log_probs`.

    Returns:
        The log-probabilities of all action tokens, (A,), in nats, the same on all ranks. On each
        rank, gradients flow only into the rank's own forward passes.
    """
    rank = accelerator.process_index
    ranks = accelerator.num_processes
    device = accelerator.device
    lengths = [len(t.ids) for t in trajectories]
    outputs = [torch.zeros(t.action_count, device=device) for t in trajectories]
    # FSDP casts weights and activations itself, see `engine.models`.
    bf16 = accelerator.mixed_precision == "bf16" and not isinstance(model, FSDPModule)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        for passes in schedule_rounds(lengths, tokens, ranks):
            # FSDP needs every rank to run a forward pass, since each holds a part of every weight.
            # A rank without work repeats a sequence and multiplies the result by 0.
            has_work = rank < len(passes)
            indices = passes[rank] if has_work else passes[-1][-1:]
            batch = [trajectories[index] for index in indices]
            values = int(has_work) * token_log_probs(model, batch, logits_processor)
            for index, value in zip(indices, values.split([t.action_count for t in batch])):
                outputs[index] = outputs[index] + value
    own = torch.cat(outputs)                                                      # (A,)
    if ranks == 1:
        return own

    # Value: each rank has filled in the tokens of its own passes, and has left the others 0. The
    # sum over ranks is complete, so every rank computes the loss of the whole batch.
    # Gradient: the backward pass of a rank only reaches its own passes, so the gradient of the
    # batch is the sum over ranks. But FSDP, or `dpo.average_gradients` without it, computes the
    # average: the sum divided by the number of ranks. Multiplying each rank's gradient by the
    # number of ranks cancels this division.
    value = accelerator.reduce(own.detach())
    gradient = ranks * (own - own.detach())  # zeros that have a gradient
    return value + gradient


def fits_in_round(trajectories: list[Trajectory], tokens: int, ranks: int) -> bool:
    """Returns True if trajectories need at most one forward pass of `tokens` tokens on each rank.

    This is the limit of a micro-batch (see `dpo.micro_batches`), because the activations of one
    forward pass per rank fit in memory. `schedule_rounds` may choose several smaller passes, but
    together they never hold more activations on a rank.
    """
    return len(batch_by_length([len(t.ids) for t in trajectories], tokens)) <= ranks


def schedule_rounds(lengths: list[int], tokens: int, ranks: int) -> list[list[Pass]]:
    """Distributes trajectories over the ranks.

    In each round, every rank runs one forward pass, and waits for the slowest rank.

    Args:
        lengths: The number of tokens in each trajectory, (T,).
        tokens: The maximum number of tokens in a forward pass, padding included. If it is 0, each
            trajectory gets its own pass.
        ranks: The number of ranks.

    Returns:
        The rounds. A round has at most `ranks` passes.
    """
    if ranks == 1:
        return [[indices] for indices in batch_by_length(lengths, tokens)]

    # The largest passes are the most efficient ones, but some ranks may be idle in the last round.
    # We try several token limits, and choose the one with the shortest estimated time.
    best = []
    least = math.inf
    for part in range(CANDIDATES, 0, -1):
        passes = batch_by_length(lengths, tokens * part / CANDIDATES)
        passes.sort(key=lambda indices: cost(indices, lengths), reverse=True)
        rounds = []
        time = 0
        for first in range(0, len(passes), ranks):
            rounds.append(passes[first:first + ranks])
            time += max(MIN_COST, cost(passes[first], lengths))
        if time < least:
            best = rounds
            least = time
    return best


def cost(indices: Pass, lengths: list[int]) -> int:
    """Returns the number of tokens in a forward pass, padded to its longest trajectory."""
    return len(indices) * lengths[indices[0]]


def batch_by_length(lengths: list[int], limit: float) -> list[Pass]:
    """Packs trajectories of similar length into forward passes, so that there is little padding.

    Args:
        lengths: The number of tokens in each trajectory, (T,).
        limit: The maximum number of tokens in a forward pass, padding included. A trajectory that
            has more forms a pass by itself.

    Returns:
        The passes. The longest trajectories come first.
    """
    passes = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not passes or cost(passes[-1], lengths) + lengths[passes[-1][0]] > limit:
            passes.append([])
        passes[-1].append(index)
    return passes
