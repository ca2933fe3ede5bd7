"""Several sequences in one row of the model, no padding; what they begin alike runs once.

    a b c  and  a b d    are the four rows of the model    a b c d
    rows  = [0, 1, 2, 0, 1, 3]   (M,): the row of each token of all sequences, end to end
    first = [0, 1, 2, 5]         (N,): where each row first stands among these M

The trajectories of an instruction share its prompt and often their first turns. A sequence is
anything with `ids` and `action_mask`, both of its length.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface


@dataclass(frozen=True)
class Packed:
    """What a forward pass takes, and where in its logits the action tokens are predicted.

    The A action tokens have U distinct targets, since sequences share some; K rows of logits, the
    only ones made, predict them, two tokens where two sequences part (K <= U <= A).
    """
    ids: Tensor                # (1, N)
    positions: Tensor          # (1, N)
    attention: dict            # what `ragged_attention` needs
    predicting: Tensor         # (K,) rows whose logits are wanted
    logits_of: list | None     # (U,) each target's row of these logits, rising; None where K = U
    targets: Tensor            # (U,) token ids
    target_of: Tensor          # (A,) each action token's target


def pack(sequences, device) -> Packed:
    """The rows of `lay_out` as one row of tokens, with what each action token is predicted by."""
    rows, first = lay_out(sequences)                                                 # (M,), (N,)
    ids = [i for s in sequences for i in s.ids]
    positions = [k for s in sequences for k in range(len(s.ids))]
    acting, offset = [], 0  # the row of each action token
    for s in sequences:
        acting += [rows[offset + k] for k in range(1, len(s.ids)) if s.action_mask[k]]
        offset += len(s.ids)
    before = {row: rows[first[row] - 1] for row in acting}  # a target -> the row that predicts it
    predicting = {row: n for n, row in enumerate(dict.fromkeys(before.values()))}  # -> its number
    targets = sorted(before, key=lambda row: predicting[before[row]])
    number = {row: n for n, row in enumerate(targets)}
    tensor = partial(torch.tensor, dtype=torch.long, device=device)
    shared = dict(rows=tensor(rows), first=tensor(first)) if len(first) < len(rows) else {}
    return Packed(
        ids=tensor([[ids[m] for m in first]]),
        positions=tensor([[positions[m] for m in first]]),
        attention=dict(lengths=[len(s.ids) for s in sequences], **shared),
        predicting=tensor(list(predicting)),
        logits_of=([predicting[before[row]] for row in targets]
                   if len(predicting) < len(targets) else None),
        targets=tensor([ids[first[row]] for row in targets]),
        target_of=tensor([number[row] for row in acting]))


def lay_out(sequences) -> tuple[list[int], list[int]]:
    """(rows, first), as above. A share below 1/16 of a sequence would cost more than it saves."""
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
                     scaling=None, lengths=None, cache=None, **others):
    """Causal attention of sequences laid end to end in one row; no padding, no mask tensor.

    query (1, H, N, d), key and value (1, H_kv, N, d); returns (1, N, H, d). rows and first: as
    `lay_out` says, where sequences share tokens; else N = sum(lengths). Rollouts: of `cache`.
    """
    rows, first = others.pop("rows", None), others.pop("first", None)
    if other := other_form(key, value, attention_mask, lengths, cache, **others):
        raise ValueError(f"{type(module).__name__} {other}; use a model with full attention in all "
                         "layers, such as Llama, Qwen2 or Qwen3")
    if cache is not None:
        return cache.attend(module.layer_idx, query, key, value, scaling), None
    if rows is not None:
        query, key, value = (x.index_select(2, rows) for x in (query, key, value))
    outputs = torch.cat([
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling,
                                       enable_gqa=q.shape[1] != k.shape[1])
        for q, k, v in zip(*(x.split(lengths, 2) for x in (query, key, value)))], 2)
    outputs = outputs if first is None else outputs.index_select(2, first)
    return outputs.transpose(1, 2).contiguous(), None


def other_form(key, value, attention_mask, lengths, cache, sliding_window=None, softcap=None,
               s_aux=None, **others) -> str | None:
    """What makes this call no softmax attention over all earlier tokens; None if it is one."""
    if lengths is None:
        return "is not told where sequences begin: the model's code hands on no arguments"
    if attention_mask is not None:
        return "gets a mask of the model's own"
    longest = cache.tokens if cache else max(lengths)
    if sliding_window is not None and sliding_window < longest:
        return f"sees only the last {sliding_window:,} of {longest:,} tokens (sliding_window)"
    if softcap is not None:
        return f"caps its scores (softcap={softcap})"
    if s_aux is not None:
        return "has attention sinks (s_aux)"
    if key.shape[-1] != value.shape[-1]:
        return f"has keys of {key.shape[-1]} and values of {value.shape[-1]} numbers"
    if cache and [*key.shape[1::2]] != cache.shape:
        return "has {} key heads of {} numbers where its config says {} of {}".format(
            *key.shape[1::2], *cache.shape)
    return None


AttentionInterface.register("ragged", ragged_attention)
