"""Prefix sharing: if several trajectories start alike, a forward pass runs their prefix only once.

On a CPU, where matmuls take most of the time, `Run.log_probs` uses this module instead of
`engine.forward_passes` if the model passes the check in `engine.self_check`.

    trajectories     a b c      and    a b d
    packed sequence  a b c d
    paths            [0, 1, 2]  and    [0, 1, 3]     indices into the packed sequence

Layers that process each token by itself run on the packed sequence. An attention layer unpacks the
sequence into padded batches of trajectories, computes attention, and packs the outputs again.

Shapes: the packed sequence has N tokens, and K of them predict the A action tokens of all
trajectories. An attention batch has T trajectories, padded to L tokens. V is the vocabulary size.
There are H query heads of size d.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from dpo import Ids, Trajectory, chunk_by_cost, in_fp32, logits_at, pad_right
from engine.forward_passes import batch_by_length
from engine.kv_cache import common_prefix_length

ATTENTION_TOKENS = 512  # maximum number of tokens in an attention batch, padding included [ours]


def log_probs(
    model,
    trajectories: list[Trajectory],
    tokens: int,
    logits_processor: Callable = in_fp32,
) -> Tensor:
    """Computes `dpo.token_log_probs` of many trajectories in several forward passes.

    Args:
        model: A causal language model with the attention implementation "prefix_sharing".
        trajectories: The trajectories. Consecutive ones share a forward pass.
        tokens: The maximum number of tokens in a forward pass, counted before packing.
        logits_processor: The same function as in `dpo.token_log_probs`.

    Returns:
        The log-probabilities of all action tokens, (A,), in nats.
    """
    passes = chunk_by_cost(trajectories, [len(t.ids) for t in trajectories], tokens)
    return torch.cat([packed_log_probs(model, batch, logits_processor) for batch in passes])


def packed_log_probs(model, trajectories: list[Trajectory], logits_processor: Callable) -> Tensor:
    """Computes `log_probs` in a single forward pass."""
    ids, position_ids, paths = pack_prefix_tree(trajectories)

    # 1. Form attention batches of trajectories with similar lengths. Their outputs will be
    # concatenated, so also find the index of each packed token in the concatenation. A token that
    # trajectories share has the same output in all of them, so any of its indices will do.
    unpack_indices = []
    repack_index = [0] * len(ids)  # (N,)
    start = 0
    for batch in batch_by_length([len(path) for path in paths], ATTENTION_TOKENS):
        indices = pad_right([paths[n] for n in batch])                            # (T, L)
        for n in batch:
            for k, index in enumerate(paths[n]):
                repack_index[index] = start + k
            start += indices.shape[1]
        unpack_indices.append(indices)

    # 2. Find the packed token that predicts each action token. A shared token may predict action
    # tokens of several trajectories.
    predicting, targets = [], []  # (A,)
    for t, path in zip(trajectories, paths):
        for k, is_action in enumerate(t.action_mask):
            if is_action and k:
                predicting.append(path[k - 1])
                targets.append(t.ids[k])
    predicting = torch.tensor(predicting, dtype=torch.long)                       # (A,)
    targets = torch.tensor(targets, dtype=torch.long)                             # (A,)

    # 3. Run the model, and compute the logits of each predicting token only once.
    indices, rows = predicting.unique(return_inverse=True)                        # (K,), (A,)
    logits = logits_at(indices, model, input_ids=torch.tensor([ids]),
                       position_ids=torch.tensor([position_ids]), unpack_indices=unpack_indices,
                       repack_index=torch.tensor(repack_index))                   # (1, K, V)
    return logits_processor(logits[0]).log_softmax(-1)[rows, targets]             # (A,)


def pack_prefix_tree(trajectories: list[Trajectory]) -> tuple[Ids, list[int], list[list[int]]]:
    """Packs trajectories into one sequence that contains each distinct prefix once.

    Returns:
        The packed token ids, (N,), their position ids, (N,), and the path of each trajectory, which
        lists the indices of its tokens in the packed sequence.
    """
    ids, position_ids = [], []
    paths = [[]] * len(trajectories)
    previous, path = [], []
    # In lexicographic order, each trajectory shares its longest prefix with the one before it.
    for n in sorted(range(len(trajectories)), key=lambda n: trajectories[n].ids):
        own = trajectories[n].ids
        shared = common_prefix_length(previous, own)
        path = path[:shared] + [*range(len(ids), len(ids) + len(own) - shared)]
        ids += own[shared:]
        position_ids += range(shared, len(own))
        paths[n] = path
        previous = own
    return ids, position_ids, paths


def attend(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, unpack_indices=None,
           repack_index=None, **options):
    """Computes causal attention within each trajectory of a packed sequence.

    Without `unpack_indices`, it computes attention as transformers does.

    Args:
        module: The attention layer.
        query, key, value: The queries, keys and values, (1, H, N, d) each. Keys and values may have
            fewer heads than H.
        attention_mask: The attention mask. A packed sequence has none.
        unpack_indices: The packed indices of the tokens in each attention batch, (T, L) each.
        repack_index: The index of each packed token in the concatenated outputs, (N,).
        options: Further arguments from transformers.

    Returns:
        The outputs, (1, N, H, d), and None in place of the attention weights.
    """
    if unpack_indices is None:
        sdpa = AttentionInterface._global_mapping["sdpa"]
        return sdpa(module, query, key, value, attention_mask, **options)
    packed = [x[0].transpose(0, 1) for x in (query, key, value)]                  # (N, H, d) each
    outputs = []
    for indices in unpack_indices:
        q, k, v = (x[indices].transpose(1, 2) for x in packed)                    # (T, H, L, d)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=options.get("scaling"),
            enable_gqa=query.shape[1] != key.shape[1])                            # (T, H, L, d)
        outputs.append(out.transpose(1, 2).flatten(0, 1))                         # (T L, H, d)
    return torch.cat(outputs)[repack_index][None], None


# transformers passes no attention mask, since no mask function is registered under this name.
AttentionInterface.register("prefix_sharing", attend)
