"""Passes in which trajectories share what they begin alike: it runs once. On a CPU, where products
of matrices take most of the time, `Run.log_probs` uses it in place of `engine.forward_passes`, if
`engine.self_check` has found it right for the model.

    a b c  and  a b d    are the four tokens    a b c d    of a row
    paths = [0, 1, 2], [0, 1, 3]                of each trajectory the places of its tokens

Layers that treat each token by itself see the row. Attention sees trajectories, side by side.

Shapes: N tokens in a row, of which K predict A actions; T trajectories of L tokens in a part; V
words; H heads of d numbers.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from dpo import Ids, Trajectory, chunk_by_cost, in_fp32, logits_at, pad_right
from engine.forward_passes import batch_by_length
from engine.kv_cache import common_prefix_length

ATTENTION_TOKENS = 512  # tokens of trajectories of like length, with padding, that attend at a time [ours]


def log_probs(
    model,
    trajectories: list[Trajectory],
    tokens: int,
    logits_processor: Callable = in_fp32,
) -> Tensor:
    """What `dpo.token_log_probs` gives of many trajectories, (A,), by passes of at most so many
    tokens. Neighbours share a pass. The model has the attention "prefix_sharing"."""
    passes = chunk_by_cost(trajectories, [len(t.ids) for t in trajectories], tokens)
    return torch.cat([packed_log_probs(model, some, logits_processor) for some in passes])


def packed_log_probs(model, trajectories: list[Trajectory], logits_processor: Callable) -> Tensor:
    """The same of trajectories that are one row."""
    ids, depths, paths = pack_prefix_tree(trajectories)

    # Which trajectories attend side by side, and where each token of the row stands among them.
    parts = []
    stands = [0] * len(ids)  # (N,)
    before = 0
    for part in batch_by_length([len(path) for path in paths], ATTENTION_TOKENS):
        places = pad_right([paths[n] for n in part])                                 # (T, L)
        for n in part:
            for k, place in enumerate(paths[n]):
                stands[place] = before + k
            before += places.shape[1]
        parts.append(places)

    # Where trajectories part, and in what they share, a token predicts for several.
    predicting, targets = [], []  # (A,)
    for t, path in zip(trajectories, paths):
        for k, is_action in enumerate(t.action_mask):
            if is_action and k:
                predicting.append(path[k - 1])
                targets.append(t.ids[k])
    predicting = torch.tensor(predicting, dtype=torch.long)                       # (A,)
    targets = torch.tensor(targets, dtype=torch.long)                             # (A,)
    places, which = predicting.unique(return_inverse=True)                        # (K,), (A,)
    logits = logits_at(places, model, input_ids=torch.tensor([ids]),
                       position_ids=torch.tensor([depths]), parts=parts,
                       stands=torch.tensor(stands))                               # (1, K, V)
    return logits_processor(logits[0]).log_softmax(-1)[which, targets]                      # (A,)


def pack_prefix_tree(trajectories: list[Trajectory]) -> tuple[Ids, list[int], list[list[int]]]:
    """The row of some trajectories: its tokens, (N,); the place of each in the trajectories that
    it is of, (N,); and the path of each trajectory."""
    ids, depths = [], []
    paths = [[]] * len(trajectories)
    before, path = [], []
    # In the order of their ids, each shares most with the one before it.
    for n in sorted(range(len(trajectories)), key=lambda n: trajectories[n].ids):
        own = trajectories[n].ids
        shared = common_prefix_length(before, own)
        path = path[:shared] + [*range(len(ids), len(ids) + len(own) - shared)]
        ids += own[shared:]
        depths += range(shared, len(own))
        paths[n] = path
        before = own
    return ids, depths, paths


def attend(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, parts=None,
           stands=None, **options):
    """Attends causally within each trajectory of a row, as `packed_log_probs` calls it; else as
    transformers does.

    Args:
        module: The layer of transformers.
        query, key, value: (1, H, N, d), of keys and values perhaps fewer heads.
        attention_mask: None, with parts.
        parts: The places in the row of the tokens of trajectories that attend side by side, (T, L)
            each.
        stands: Where among all of these each token of the row stands, (N,).
        options: What else transformers says of its attention.

    Returns:
        (1, N, H, d), and no weights.
    """
    if parts is None:
        sdpa = AttentionInterface._global_mapping["sdpa"]
        return sdpa(module, query, key, value, attention_mask, **options)
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]                    # (N, H, d) each
    found = []
    for places in parts:
        q, k, v = (row[places].transpose(1, 2) for row in rows)                   # (T, H, L, d)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=options.get("scaling"),
            enable_gqa=query.shape[1] != key.shape[1])                            # (T, H, L, d)
        found.append(out.transpose(1, 2).flatten(0, 1))                           # (T L, H, d)
    return torch.cat(found)[stands][None], None


AttentionInterface.register("prefix_sharing", attend)
