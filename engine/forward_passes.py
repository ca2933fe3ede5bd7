"""Forward passes on padded batches of trajectories, distributed over all ranks.

The grouping of trajectories into batches affects only the running time and rounding errors.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dpo import Trajectory, in_fp32, token_log_probs

# `schedule_rounds` tries this many limits on the number of tokens in a forward pass [ours].
CANDIDATES = 64
# Forward passes with fewer tokens take about as long as one with this many tokens [ours].
MIN_COST = 1024
Pass = list[int]  # the indices of the trajectories in a forward pass, the longest one first


def distributed_log_probs(
    accelerator,
    model,
    trajectories: list[Trajectory],
    tokens: int,
    logits_processor: Callable = in_fp32,
) -> Tensor:
    """Computes the same log-probabilities as `dpo.token_log_probs`, but in parallel on all ranks.

    Args:
        model: A causal language model, either a full copy on each rank or sharded by FSDP2.
        trajectories: The trajectories. Every rank has to pass the same list.
        tokens: The maximum number of tokens in a forward pass, padding included. If it is 0, the
            batch size is 1.
        logits_processor: The same function as in `dpo.token_log_probs`.

    Returns:
        The log-probabilities of all action tokens of all trajectories, (A,), in nats, on every
        rank. In the backward pass, each rank computes only the gradients of the forward passes that
        it ran itself.
    """
    rank = accelerator.process_index
    ranks = accelerator.num_processes
    device = accelerator.device
    lengths = [len(t.ids) for t in trajectories]
    outputs = [torch.zeros(t.action_count, device=device) for t in trajectories]
    # FSDP needs no autocast, because it casts weights and activations to bf16 itself.
    bf16 = accelerator.mixed_precision == "bf16" and not isinstance(model, FSDPModule)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        for passes in schedule_rounds(lengths, tokens, ranks):
            # FSDP needs every rank to run a forward pass. A rank without work repeats a sequence of
            # another rank and multiplies the result by 0.
            has_work = rank < len(passes)
            indices = passes[rank] if has_work else passes[-1][-1:]
            batch = [trajectories[index] for index in indices]
            values = int(has_work) * token_log_probs(model, batch, logits_processor)
            for index, value in zip(indices, values.split([t.action_count for t in batch])):
                outputs[index] = outputs[index] + value
    own = torch.cat(outputs)                                                      # (A,)
    if ranks == 1:
        return own

    # Value: each rank holds the log-probabilities of its own forward passes, and zeros for all
    # other tokens. The sum over ranks contains all log-probabilities, so every rank can compute the
    # loss of the whole batch.
    # Gradient: the gradient of the batch is the sum of the ranks' gradients. However, FSDP and
    # `average_and_clip` compute the mean over ranks. Multiplying each rank's gradient by the number
    # of ranks turns the mean into the sum.
    value = accelerator.reduce(own.detach())
    gradient = ranks * (own - own.detach())  # its value is 0, so it adds only a gradient
    return value + gradient


def fits_in_round(trajectories: list[Trajectory], tokens: int, ranks: int) -> bool:
    """Returns True if a single forward pass per rank is enough for all trajectories.

    All activations of a micro-batch have to stay in memory until the backward pass. Each rank has
    enough memory for one forward pass of `tokens` tokens, padding included. If `schedule_rounds`
    splits a micro-batch into several smaller forward passes, these together need no more memory
    than that single forward pass.
    """
    return len(batch_by_length([len(t.ids) for t in trajectories], tokens)) <= ranks


def schedule_rounds(lengths: list[int], tokens: int, ranks: int) -> list[list[Pass]]:
    """Groups trajectories into forward passes, and distributes these over the ranks.

    The ranks run forward passes in rounds. In a round, each rank runs one forward pass and then
    waits for the slowest rank. The schedule is chosen to minimise the total time.

    Args:
        lengths: The number of tokens in each trajectory, (T,).
        tokens: The maximum number of tokens in a forward pass, padding included. If it is 0, the
            batch size is 1.

    Returns:
        A list of rounds, each with one forward pass per rank. The last round may have fewer passes.
    """
    if ranks == 1:
        return [[indices] for indices in batch_by_length(lengths, tokens)]

    # Large forward passes are efficient, but some ranks may have no work in the last round.
    # Smaller forward passes can be distributed more evenly.
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
    """Returns the number of tokens in a forward pass, padding included."""
    return len(indices) * lengths[indices[0]]


def batch_by_length(lengths: list[int], limit: float) -> list[Pass]:
    """Groups trajectories of similar length into forward passes, to keep padding small.

    Args:
        lengths: The number of tokens in each trajectory, (T,).
        limit: The maximum number of tokens in a forward pass, padding included. A trajectory that
            is longer than the limit gets its own forward pass.
    """
    passes = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not passes or cost(passes[-1], lengths) + lengths[passes[-1][0]] > limit:
            passes.append([])
        passes[-1].append(index)
    return passes


def average_and_clip(model, max_norm: float) -> float:
    """Averages the gradients over ranks, and clips them like `dpo.clip_gradients`.

    Returns the total norm before clipping.
    """
    # FSDP has already averaged the gradients of a sharded model.
    averages = torch.distributed.is_initialized() and not isinstance(model, FSDPModule)
    for p in model.parameters():
        if not p.requires_grad:
            continue
        if p.grad is None:  # all ranks must reduce the same tensors
            p.grad = torch.zeros_like(p)
        if averages:
            p.grad /= torch.distributed.get_world_size()
            torch.distributed.all_reduce(p.grad)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if isinstance(norm, DTensor):  # the model is sharded
        norm = norm.full_tensor()
    return norm.item()
