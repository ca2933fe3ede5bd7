"""Forward passes on padded batches of trajectories, distributed over all ranks.

`Run.log_probs` calls `distributed_log_probs`, unless it can use `engine.prefix_sharing`. How the
trajectories are grouped into batches only affects the running time and the rounding errors.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dpo import Trajectory, in_fp32, token_log_probs

# `schedule_rounds` tries this many limits on the number of tokens in a forward pass. The value is
# our choice.
CANDIDATES = 64
# The minimum number of tokens in the time estimate of a forward pass. Forward passes with fewer
# tokens take about as long as a forward pass with 1,024 tokens. The value is our choice.
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

    The trajectories are grouped into several forward passes, which are distributed over the ranks.

    Args:
        accelerator: The Accelerator of Hugging Face accelerate.
        model: A causal language model, either a full copy on each rank or sharded by FSDP2.
        trajectories: The trajectories. Every rank has to pass the same list.
        tokens: The maximum number of tokens in a forward pass, padding included. If it is 0, the
            batch size is 1.
        logits_processor: The same function as in `dpo.token_log_probs`.

    Returns:
        The log-probabilities of all action tokens of all trajectories, (A,), in nats. Every rank
        gets the values of all trajectories. In the backward pass, each rank only computes the
        gradients of the forward passes that it ran itself.
    """
    rank = accelerator.process_index
    ranks = accelerator.num_processes
    device = accelerator.device
    lengths = [len(t.ids) for t in trajectories]
    outputs = [torch.zeros(t.action_count, device=device) for t in trajectories]
    # FSDP does not need autocast, because FSDP itself casts weights and activations to bf16 (see
    # `engine.models`).
    bf16 = accelerator.mixed_precision == "bf16" and not isinstance(model, FSDPModule)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        for passes in schedule_rounds(lengths, tokens, ranks):
            # In FSDP, each rank holds a shard of every weight, so all ranks have to take part in
            # every forward pass. A rank without work runs a sequence of another rank again and
            # multiplies the result by 0.
            has_work = rank < len(passes)
            indices = passes[rank] if has_work else passes[-1][-1:]
            batch = [trajectories[index] for index in indices]
            values = int(has_work) * token_log_probs(model, batch, logits_processor)
            for index, value in zip(indices, values.split([t.action_count for t in batch])):
                outputs[index] = outputs[index] + value
    own = torch.cat(outputs)                                                      # (A,)
    if ranks == 1:
        return own

    # Value: each rank has the log-probabilities of its own forward passes, and zeros for all other
    # tokens. The sum over ranks has all log-probabilities, so every rank can compute the loss of
    # the whole batch.
    # Gradient: the backward pass of a rank only covers the rank's own forward passes. The gradient
    # of the batch is the sum of these gradients over ranks. However, FSDP and `average_gradients`
    # compute the mean over ranks. Multiplying each rank's gradient by the
    # number of ranks turns the mean into the sum.
    value = accelerator.reduce(own.detach())
    gradient = ranks * (own - own.detach())  # its value is 0, so it only adds a gradient
    return value + gradient


def fits_in_round(trajectories: list[Trajectory], tokens: int, ranks: int) -> bool:
    """Returns True if a single forward pass per rank is enough for all trajectories.

    `dpo.micro_batches` uses this function to limit the size of a micro-batch. All activations of a
    micro-batch have to stay in memory until the backward pass. Each rank has enough memory for one
    forward pass of `tokens` tokens. `schedule_rounds` may still split a micro-batch
    into several smaller forward passes. On each rank, these forward passes together need
    no more memory than one forward pass of `tokens` tokens.

    Args:
        trajectories: The trajectories.
        tokens: The maximum number of tokens in a forward pass, padding included.
        ranks: The number of ranks.
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
        ranks: The number of ranks.

    Returns:
        A list of rounds. Each round is a list of forward passes, one for each rank. The last round
        may have fewer forward passes than ranks.
    """
    if ranks == 1:
        return [[indices] for indices in batch_by_length(lengths, tokens)]

    # Large forward passes are efficient, but some ranks may have no work in the last round.
    # Smaller forward passes can be distributed more evenly. We try several limits on the number of
    # tokens, and choose the schedule with the shortest estimated time.
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
            is longer than the limit gets a forward pass of its own.

    Returns:
        A list of forward passes. Each forward pass is a list of indices into `lengths`, sorted from
        the longest to the shortest trajectory.
    """
    passes = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not passes or cost(passes[-1], lengths) + lengths[passes[-1][0]] > limit:
            passes.append([])
        passes[-1].append(index)
    return passes


def average_and_clip(model, max_norm: float) -> float:
    """Averages the gradients over ranks, and clips them like `dpo.clip_gradients`.

    In data-parallel training, each rank backpropagates only through its own forward passes. The
    gradient of the batch is the sum over ranks. Averaging divides this sum by the number of ranks.
    To compensate, `distributed_log_probs` multiplies gradients by the same number.

    Returns the total norm before clipping.
    """
    average_gradients(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if isinstance(norm, DTensor):  # the model is sharded
        norm = norm.full_tensor()
    return norm.item()


def average_gradients(model) -> None:
    """Averages the gradients over data-parallel ranks, unless FSDP has already averaged them.

    Trainable weights without a gradient get a gradient of 0, because all ranks must reduce the same
    tensors. An example is the image encoder of a model that is trained only on text.
    """
    unsharded = torch.distributed.is_initialized() and not isinstance(model, FSDPModule)
    for p in model.parameters():
        if not p.requires_grad:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if unsharded:
            p.grad /= torch.distributed.get_world_size()
            torch.distributed.all_reduce(p.grad)
