"""log softmax at some targets, in pieces: its fp32 arrays of all logits would be half of a pass."""

from bisect import bisect_left
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

PIECE = 2 ** 24  # logits that are in fp32 at a time [ours]


def target_log_probs(logits: Tensor, targets: Tensor, logits_of: list[int] | None,
                     sampler) -> Tensor:
    """log pi of targets (U,) by rows of logits (K, V), (U,) in nats, fp32 or more inside.

    logits_of: each target's row, in order; None where it is the target's own number. Nobody else
    may need the logits: those of several pieces are replaced by their gradient.
    """
    rows = None if logits_of is None else torch.tensor(logits_of, device=logits.device)
    step = max(1, PIECE // logits.shape[1])
    at = [*range(0, len(logits), step), len(logits)]
    of = at if rows is None else [bisect_left(logits_of, k) for k in at]
    pieces = list(zip(at, at[1:], of, of[1:]))
    whole = partial(of_piece, sampler=sampler)
    return (InPieces.apply(logits, targets, rows, pieces, whole) if len(pieces) > 1 else
            whole(logits, targets, rows))


def of_piece(logits: Tensor, targets: Tensor, rows: Tensor | None, sampler) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampler.temperature != 1:
        logits = logits / sampler.temperature
    if sampler.suppress_tokens:
        logits = logits.index_fill(1, targets.new_tensor(sampler.suppress_tokens), -torch.inf)
    if rows is not None:  # index_select, unlike [], adds gradients in a fixed order
        logits = logits.index_select(0, rows)
    return -F.cross_entropy(logits, targets, reduction="none")


class InPieces(torch.autograd.Function):
    """`of_piece` of (first row, end, first target, end) each, computed again to differentiate."""

    @staticmethod
    def forward(ctx, logits, targets, rows, pieces, whole):
        ctx.save_for_backward(logits, targets, rows)
        ctx.work = pieces, whole
        return torch.cat([whole(*part) for part in InPieces.cut(logits, targets, rows, pieces)])

    @staticmethod
    def backward(ctx, gradient):
        logits, targets, rows = ctx.saved_tensors
        pieces, whole = ctx.work
        parts = InPieces.cut(logits, targets, rows, pieces)
        for (part, *others), (_, _, u, until) in zip(parts, pieces):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                found = whole(leaf, *others)
            part.copy_(torch.autograd.grad(found, leaf, gradient[u:until])[0])
        return logits, None, None, None, None

    @staticmethod
    def cut(logits, targets, rows, pieces):
        return [(logits[k:end], targets[u:until], None if rows is None else rows[u:until] - k)
                for k, end, u, until in pieces]
