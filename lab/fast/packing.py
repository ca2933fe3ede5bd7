"""Several trajectories in one row of a model, without padding; what they begin alike runs once.

    a b c  and  a b d    are the four tokens of the row    a b c d
    rows  = [0, 1, 2, 0, 1, 3]   (M,): the place in the row of each token of all, end to end
    first = [0, 1, 2, 5]         (N,): where each of these first stands among the M

It gives the numbers of `dpo.token_log_probs` for models of plain causal attention in all layers;
for others `ragged_attention` raises ValueError, and the run stays plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

import dpo
from dpo import Sampler, Trajectory

# Logits that are in fp32 at a time: those of a long pass would take half of its memory [ours].
PIECE = 2 ** 24


def token_log_probs(model, trajectories: list[Trajectory], sampler: Sampler = Sampler()) -> Tensor:
    """Computes what `dpo.token_log_probs` computes, by one row: log pi(t_k | t_<k) of every action
    token of the trajectories, laid end to end, (A,), in nats."""
    rows, first = lay_out(trajectories)                                           # (M,), (N,)
    ids, positions = [], []  # (M,) each
    for t in trajectories:
        ids += t.ids
        positions += range(len(t.ids))

    # Where in the row each action token stands, and the token before it, which predicts it. What
    # two trajectories share is predicted once: the A action tokens have U places.
    acting = places_of_actions(trajectories, rows)                                # (A,)
    predictor = {place: rows[first[place] - 1] for place in acting}               # U of them

    # Where two trajectories part, one token predicts two, so that K <= U tokens predict.
    predicting = list(dict.fromkeys(predictor.values()))                          # (K,)
    number = {place: n for n, place in enumerate(predicting)}
    targets = sorted(predictor, key=lambda place: number[predictor[place]])       # (U,)

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=model.device)

    shared = {}
    if len(first) < len(rows):
        shared = dict(rows=tensor(rows), first=tensor(first))
    logits = model(input_ids=tensor([[ids[m] for m in first]]),
                   position_ids=tensor([[positions[m] for m in first]]),
                   lengths=[len(t.ids) for t in trajectories], **shared,
                   logits_to_keep=tensor(predicting), use_cache=False).logits[0]  # (K, V)
    if len(predicting) < len(targets):
        logits = logits.index_select(0, tensor([number[predictor[p]] for p in targets]))
    wanted = tensor([ids[first[place]] for place in targets])                     # (U,)
    found = of_targets(logits, wanted, sampler)                                   # (U,)

    order = {place: n for n, place in enumerate(targets)}
    return found.index_select(0, tensor([order[place] for place in acting]))      # (A,)


def places_of_actions(trajectories: list[Trajectory], rows: list[int]) -> list[int]:
    """The place in the row of each action token that is predicted, (A,)."""
    places = []
    begin = 0  # of the trajectory, among the tokens of all
    for t in trajectories:
        for k in range(1, len(t.ids)):
            if t.action_mask[k]:
                places.append(rows[begin + k])
        begin += len(t.ids)
    return places


def of_targets(logits: Tensor, targets: Tensor, sampler: Sampler) -> Tensor:
    """log softmax of logits, (U, V), at the targets, (U,)."""
    def of_piece(logits, targets):
        return -F.cross_entropy(sampler.apply(logits), targets, reduction="none")

    size = max(1, PIECE // logits.shape[1])
    if len(logits) <= size:
        return of_piece(logits, targets)
    found = []
    for piece in zip(logits.split(size), targets.split(size)):
        found.append(checkpoint(of_piece, *piece, use_reentrant=False))  # made again, to
    return torch.cat(found)                                              # differentiate


def log_probs(model, trajectories: list[Trajectory], tokens: int, sampler: Sampler) -> Tensor:
    """The same of many, (A,), in passes of at most so many tokens; neighbours share a pass."""
    passes = dpo.fill(trajectories, [len(t.ids) for t in trajectories], tokens)
    return torch.cat([token_log_probs(model, some, sampler) for some in passes])


def lay_out(trajectories: list[Trajectory]) -> tuple[list[int], list[int]]:
    """(rows, first), as above. A share below 1/16 of a trajectory would cost more than it saves."""
    rows, first = [], []
    paths = []  # of each trajectory so far, the places in the row of its tokens
    for t in trajectories:
        # The trajectory before with which it shares most, and the places of that.
        best = (0, [])
        for other, path in zip(trajectories, paths):
            best = max(best, (shared_beginning(t.ids, other.ids), path))
        shared, path = best
        if 16 * shared < len(t.ids):
            shared = 0

        size = len(first)
        first += range(len(rows) + shared, len(rows) + len(t.ids))
        paths.append(path[:shared] + list(range(size, len(first))))
        rows += paths[-1]
    return rows, first


def shared_beginning(a: list[int], b: list[int]) -> int:
    """How many tokens both begin with."""
    for k, (one, other) in enumerate(zip(a, b)):
        if one != other:
            return k
    return min(len(a), len(b))


def ragged_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None,
                     scaling=None, **options):
    """Attends causally within each of some trajectories that are laid end to end in one row.

    Args:
        module: The layer of transformers.
        query, key, value: (1, H, N, d), and (1, H_kv, N, d) each.
        attention_mask: None.
        scaling: Of scores.
        options: lengths, whose sum is N; where trajectories share tokens, rows and first as
            `lay_out` says; in rollouts the cache.

    Returns:
        (1, N, H, d), and no weights.
    """
    odd = [name for name in ("sliding_window", "softcap", "s_aux") if options.get(name) is not None]
    masked = attention_mask is not None or "lengths" not in options
    if odd or masked or key.shape[-1] != value.shape[-1]:
        raise ValueError(f"{type(module).__name__} is no plain causal attention: {odd or 'a mask'}")
    if "cache" in options:
        return options["cache"].attend(module.layer_idx, query, key, value, scaling), None

    # What is shared is laid out once for each trajectory, and taken once from what comes out.
    rows = options.get("rows")
    if rows is not None:
        query, key, value = (x.index_select(2, rows) for x in (query, key, value))
    parts = [x.split(options["lengths"], 2) for x in (query, key, value)]
    outputs = []
    for q, k, v in zip(*parts):
        outputs.append(F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]))
    outputs = torch.cat(outputs, 2)
    if rows is not None:
        outputs = outputs.index_select(2, options["first"])
    return outputs.transpose(1, 2).contiguous(), None


AttentionInterface.register("ragged", ragged_attention)
