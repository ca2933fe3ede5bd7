"""Prefix sharing: a forward pass that processes a common prefix of several trajectories only once.

`Run.log_probs` uses this module if training runs in a single process on a CPU, where most of the
time is spent in matmuls. Prefix sharing makes the matrices smaller.

Trajectories are packed into a single sequence. For example, "a b c" and "a b d" share "a b":

    trajectories     a b c      and    a b d
    packed sequence  a b c d
    paths            [0, 1, 2]  and    [0, 1, 3]     indices into the packed sequence

Most layers, such as MLPs, process each token independently, so they run on the packed sequence. An
attention layer first unpacks the sequence into padded batches of trajectories. The layer then
computes attention for each batch, and packs the outputs into one sequence again.

Shapes: the packed sequence has N tokens. All trajectories together have A action tokens, which are
predicted by K different packed tokens. An attention batch has T trajectories, padded to L tokens. V
is the vocabulary size. There are H query heads of size d.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from dpo import Ids, Trajectory, chunk_by_cost, in_fp32, logits_at, pad_right
from engine.forward_passes import batch_by_length
from engine.kv_cache import common_prefix_length

# The maximum number of tokens in an attention batch, padding included [ours].
ATTENTION_TOKENS = 512


def log_probs(
    model,
    trajectories: list[Trajectory],
    tokens: int,
    logits_processor: Callable = in_fp32,
) -> Tensor:
    """Computes the same log-probabilities as `dpo.token_log_probs`, but with prefix sharing.

    Args:
        model: A causal language model with the attention implementation "prefix_sharing".
        trajectories: The trajectories. Consecutive trajectories in the list are packed into the
            same forward pass, until the limit `tokens` is reached.
        tokens: The maximum number of tokens in a forward pass. Tokens are counted before packing,
            so a shared prefix counts once for each trajectory.
        logits_processor: The same function as in `dpo.token_log_probs`.
    """
    passes = chunk_by_cost(trajectories, [len(t.ids) for t in trajectories], tokens)
    return torch.cat([packed_log_probs(model, batch, logits_processor) for batch in passes])


def packed_log_probs(model, trajectories: list[Trajectory], logits_processor: Callable) -> Tensor:
    """Computes the log-probabilities of all action tokens, (A,), in a single forward pass."""
    ids, position_ids, paths = pack_prefix_tree(trajectories)

    # 1. Group trajectories of similar length into attention batches. For each packed token, find
    # the index of its output in the concatenated outputs of all batches. A shared token has several
    # identical outputs, one per trajectory, and any of their indices can be used.
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

    # 2. Find the packed token that predicts each action token: the previous token of its
    # trajectory.
    predicting, targets = [], []  # (A,)
    for t, path in zip(trajectories, paths):
        for k, is_action in enumerate(t.action_mask):
            if is_action and k:
                predicting.append(path[k - 1])
                targets.append(t.ids[k])
    predicting = torch.tensor(predicting, dtype=torch.long)                       # (A,)
    targets = torch.tensor(targets, dtype=torch.long)                             # (A,)

    # 3. Run the model. Compute logits only at the K packed tokens that predict action tokens.
    indices, rows = predicting.unique(return_inverse=True)                        # (K,), (A,)
    logits = logits_at(indices, model, input_ids=torch.tensor([ids]),
                       position_ids=torch.tensor([position_ids]), unpack_indices=unpack_indices,
                       repack_index=torch.tensor(repack_index))                   # (1, K, V)
    return logits_processor(logits[0]).log_softmax(-1)[rows, targets]             # (A,)


def pack_prefix_tree(trajectories: list[Trajectory]) -> tuple[Ids, list[int], list[list[int]]]:
    """Packs trajectories into one sequence, in which each common prefix occurs only once.

    Returns:
        The packed token ids, (N,), the position id of each packed token, (N,), and the path of each
        trajectory: the index of each of its tokens in the packed sequence.
    """
    ids, position_ids = [], []
    paths = [[]] * len(trajectories)
    previous, path = [], []
    # Visit the trajectories in lexicographic order. Of all earlier trajectories, the previous one
    # then has the longest common prefix with the current one.
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

    For a normal batch, without `unpack_indices`, this function calls "sdpa", an attention function
    of transformers.

    Args:
        query, key, value: The queries, keys and values, (1, H, N, d) each. With grouped-query
            attention, keys and values have fewer heads than H.
        unpack_indices: A tensor for each attention batch, (T, L), with indices of tokens in the
            packed sequence.
        repack_index: The index of each packed token in the concatenated outputs, (N,).

    Returns:
        The attention outputs, (1, N, H, d), and None in place of the attention weights.
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


# Only the attention function is registered. Without a registered mask function, transformers does
# not create an attention mask.
AttentionInterface.register("prefix_sharing", attend)
