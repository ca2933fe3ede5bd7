"""Several trajectories in one row of a model, without padding; what they begin alike runs once.

    a b c  and  a b d    are the four tokens of the row    a b c d
    rows  = [0, 1, 2, 0, 1, 3]   (M,): the place in the row of each token of all, end to end
    first = [0, 1, 2, 5]         (N,): where each of these first stands among the M

It gives the numbers of `dpo.token_log_probs` for models of plain causal attention in all layers;
for others `ragged_attention` raises ValueError, and the run stays plain.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

import dpo
from dpo import Sampler, Trajectory

# Logits that are in fp32 at a time: those of a long pass would take half of its memory [ours].
PIECE = 2 ** 24


def token_log_probs(model, sequences: list[Trajectory], sampler: Sampler = Sampler()) -> Tensor:
    """As `dpo.token_log_probs`, by one row: log pi of every action token, end to end, (A,), nats.
    The A action tokens have U distinct targets; K tokens of the row predict them (K <= U <= A)."""
    rows, first = lay_out(sequences)                                                 # (M,), (N,)
    ids = [i for s in sequences for i in s.ids]
    acting, offset = [], 0  # the place in the row of each action token
    for s in sequences:
        acting += [rows[offset + k] for k in range(1, len(s.ids)) if s.action_mask[k]]
        offset += len(s.ids)
    before = {row: rows[first[row] - 1] for row in acting}  # a target -> what predicts it
    predicting = {row: n for n, row in enumerate(dict.fromkeys(before.values()))}  # -> its number
    targets = sorted(before, key=lambda row: predicting[before[row]])
    number = {row: n for n, row in enumerate(targets)}

    tensor = partial(torch.tensor, dtype=torch.long, device=model.device)
    positions = [k for s in sequences for k in range(len(s.ids))]
    shared = dict(rows=tensor(rows), first=tensor(first)) if len(first) < len(rows) else {}
    logits = model(input_ids=tensor([[ids[m] for m in first]]),
                   position_ids=tensor([[positions[m] for m in first]]),
                   lengths=[len(s.ids) for s in sequences], **shared,
                   logits_to_keep=tensor(list(predicting)), use_cache=False).logits[0]    # (K, V)
    wanted = tensor([ids[first[row]] for row in targets])                                 # (U,)
    if len(predicting) < len(targets):  # two tokens where two trajectories part
        logits = logits.index_select(0, tensor([predicting[before[row]] for row in targets]))

    def of_piece(logits, wanted):
        return -F.cross_entropy(sampler.logits(logits), wanted, reduction="none")

    step = max(1, PIECE // logits.shape[1])
    pieces = [*zip(logits.split(step), wanted.split(step))]
    found = (of_piece(logits, wanted) if len(pieces) == 1 else  # made again to differentiate
             torch.cat([checkpoint(of_piece, *piece, use_reentrant=False) for piece in pieces]))
    return found.index_select(0, tensor([number[row] for row in acting]))


def log_probs(model, sequences: list[Trajectory], tokens: int, sampler: Sampler) -> Tensor:
    """The same of many, (A,), in passes of at most so many tokens; neighbours share a pass."""
    passes = dpo.fill(sequences, tokens, lambda part: sum(len(s.ids) for s in part))
    return torch.cat([token_log_probs(model, part, sampler) for part in passes])


def lay_out(sequences: list[Trajectory]) -> tuple[list[int], list[int]]:
    """(rows, first), as above. A share below 1/16 of a trajectory would cost more than it saves."""
    rows, first, paths = [], [], []
    for s in sequences:
        known, path = max(((shared_beginning(s.ids, t.ids), path)
                           for t, path in zip(sequences, paths)), default=(0, []))
        known = known if 16 * known >= len(s.ids) else 0
        first += range(len(rows) + known, len(rows) + len(s.ids))
        paths.append(path[:known] + list(range(len(first) - len(s.ids) + known, len(first))))
        rows += paths[-1]
    return rows, first


def shared_beginning(a: list[int], b: list[int]) -> int:
    """How many tokens both begin with."""
    return next((k for k, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def ragged_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None,
                     scaling=None, **how):
    """Causal attention of trajectories laid end to end in one row, (1, N, H, d), of query
    (1, H, N, d), key and value (1, H_kv, N, d). how: lengths, whose sum is N; where trajectories
    share tokens, rows and first as `lay_out` says; in rollouts the cache."""
    odd = [name for name in ("sliding_window", "softcap", "s_aux") if how.get(name) is not None]
    if odd or attention_mask is not None or "lengths" not in how or (
            key.shape[-1] != value.shape[-1]):
        raise ValueError(f"{type(module).__name__} is no plain causal attention: {odd or 'a mask'}")
    if "cache" in how:
        return how["cache"].attend(module.layer_idx, query, key, value, scaling), None
    rows, first, lengths = how.get("rows"), how.get("first"), how["lengths"]
    if rows is not None:
        query, key, value = (x.index_select(2, rows) for x in (query, key, value))
    outputs = torch.cat([
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling,
                                       enable_gqa=q.shape[1] != k.shape[1])
        for q, k, v in zip(*(x.split(lengths, 2) for x in (query, key, value)))], 2)
    outputs = outputs if first is None else outputs.index_select(2, first)
    return outputs.transpose(1, 2).contiguous(), None


AttentionInterface.register("ragged", ragged_attention)
