"""Multi-turn generation with a KV cache that is kept across turns: no token is prefilled twice.

In each layer, the cache stores the attention keys and values of all tokens that the model has
processed. Each episode has a row, and each token has a column:

    column    0    1    2    3    4    5  ...  last
    row 0     a0   a1   a2   a3   a4   -         x     episode a, 5 cached tokens
    row 1     b0   b1   b2   -    -    -         x     episode b, 3 cached tokens
    row 2     -    -    -    -    -    -         x     free

The token at position p of an episode is stored in column p, and it attends to columns 0 to p. New
tokens are appended on the right. The last column, x, is reserved for padding tokens, and the
attention mask always hides it.

A turn starts with the prefill, in which the model processes the new tokens of all episodes. The new
tokens are the prompt in the first turn, and the latest observation in later turns. In each decode
step that follows, the model processes the latest sampled token of each unfinished reply.

Shapes: the cache has R rows. A forward pass uses B of these rows and processes n new tokens per
row. The new tokens attend to the first C columns. V is the vocabulary size. There are H query heads
of size d. In grouped-query attention, G query heads share a key-value head.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from weakref import proxy

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from dpo import Ids
from engine.forward_passes import batch_by_length
from engine.sampling import PREFILL_CHUNK, Reply, Sampled, TokenSampler

# C is rounded up to a multiple of this number, because attention kernels are faster at such sizes
# [ours].
COLUMN_MULTIPLE = 16


@dataclass
class Slot:
    """An episode that occupies a row of the cache.

    An episode has the same random number generator in all turns, so `reply.rng` identifies it.
    """
    reply: Reply     # the reply of the current turn
    row: int         # the row's index in the cache
    cached_ids: Ids  # the token ids whose keys and values are stored in the row


class CachedGenerator:
    """Generates the replies of many episodes in a batch, and keeps their KV cache across turns.

    The object is called as generator([(trajectory, rng)]), with one pair for each running episode.
    It returns [(ids, log_probs)], one reply for each pair, in the same order.

    Args:
        model: A causal language model. All of its layers must use full or sliding-window attention.
        slots: The maximum number of episodes in the cache, R.
        max_tokens: The maximum number of tokens in an episode.
        max_new_tokens: The maximum number of tokens in a reply.
        tokens: The maximum number of tokens in a forward pass of the prefill, padding included.
    """

    def __init__(self, model, token_sampler: TokenSampler, slots: int, max_tokens: int,
                 max_new_tokens: int, tokens: int):
        if model.config._attn_implementation == "sdpa":
            model.set_attn_implementation("grouped")
        self.model = model
        self.token_sampler = token_sampler
        self.max_tokens = max_tokens
        self.max_new_tokens = max_new_tokens
        self.tokens = tokens
        self.shape = (slots, round_up(max_tokens + 1))  # (R, columns), with a column for padding
        self.used = []                                  # a Slot for each episode in the cache
        # The cache layers have a weak reference to the generator. A normal reference would create a
        # reference cycle, which would delay freeing the memory of the cache.
        self.cache = Cache(layer_class_to_replicate=partial(KVCacheLayer, proxy(self)))
        self.windows = window_sizes(model.config)

    @torch.inference_mode()
    def __call__(self, requests: list) -> list[Sampled]:
        # 1. Remove the slots of episodes that have ended, and create slots for new episodes.
        contexts = {rng: t.ids for t, rng in requests}
        del self.used[self.move_to_front(lambda slot: slot.reply.rng in contexts):]
        cached = {slot.reply.rng for slot in self.used}
        new = [rng for rng in contexts if rng not in cached]
        self.used += [Slot(Reply(rng), row, []) for row, rng in enumerate(new, len(self.used))]

        # 2. Prefill all tokens that are not in the cache yet. In later turns, these are the last
        # token of the previous reply, which was sampled but not processed, and the observation.
        uncached = []
        for slot in self.used:
            ids = contexts[slot.reply.rng]
            # Keep only the common prefix of the cached tokens and the episode's tokens, because the
            # previous reply may have been cut at a stop string after sampling. Exclude the
            # episode's last token (ids[:-1]), because the model has to process at least one token
            # to predict the first token of the new reply.
            slot.cached_ids = slot.cached_ids[:common_prefix_length(slot.cached_ids, ids[:-1])]
            slot.reply = Reply(slot.reply.rng)
            uncached.append(ids[len(slot.cached_ids):])
        self.append_sampled(self.prefill(uncached))

        # 3. Decode token by token. The slots of finished replies move to the back.
        while count := self.move_to_front(lambda slot: not slot.reply.done):
            slots = self.used[:count]
            self.append_sampled(self.forward(slots, [slot.reply.ids[-1:] for slot in slots]))
        replies = {slot.reply.rng: slot.reply for slot in self.used}
        return [(replies[rng].ids, replies[rng].log_probs) for rng in contexts]

    def move_to_front(self, wanted: Callable[[Slot], bool]) -> int:
        """Moves the slots that satisfy `wanted` to the front of `used`, and returns their count.

        The rows of the cache are moved in the same way. A forward pass can then use a view of the
        first rows instead of a copy.
        """
        count = sum(map(wanted, self.used))
        to_back = [n for n, slot in enumerate(self.used[:count]) if not wanted(slot)]
        to_front = [n for n, slot in enumerate(self.used[count:], count) if wanted(slot)]
        for a, b in zip(to_back, to_front):
            self.used[a], self.used[b] = self.used[b], self.used[a]
        if to_back:
            width = max(len(slot.cached_ids) for slot in self.used)
            target = self.tensor(to_back + to_front)
            source = self.tensor(to_front + to_back)
            for layer in self.cache.layers:
                for cached in layer.keys[:, :, :width], layer.values[:, :, :width]:
                    cached.index_copy_(0, target, cached.index_select(0, source))
            for row, slot in enumerate(self.used):
                slot.row = row
        return count

    def prefill(self, new: list[Ids]) -> Tensor:
        """Processes the uncached tokens of each slot in `used`, in chunks of PREFILL_CHUNK tokens.

        Returns the logits at the last token of each slot, (number of slots, V).
        """
        logits = [None] * len(new)
        for first in range(0, max(map(len, new)), PREFILL_CHUNK):
            unfinished = [n for n, ids in enumerate(new) if len(ids) > first]
            chunks = [new[n][first:first + PREFILL_CHUNK] for n in unfinished]
            for batch in batch_by_length([len(chunk) for chunk in chunks], self.tokens):
                slots = [self.used[unfinished[n]] for n in batch]
                for n, last in zip(batch, self.forward(slots, [chunks[n] for n in batch])):
                    logits[unfinished[n]] = last
        return torch.stack(logits)

    def append_sampled(self, logits: Tensor) -> None:
        """Samples the next token of the replies in the first B slots from their logits, (B, V).

        A reply is also marked as done if the reply or its episode has reached the maximum number of
        tokens.
        """
        slots = self.used[:len(logits)]
        self.token_sampler([slot.reply for slot in slots], logits)
        for slot in slots:
            sampled = len(slot.reply.ids)
            full = len(slot.cached_ids) + 1 >= self.max_tokens or sampled == self.max_new_tokens
            slot.reply.done = slot.reply.done or full

    def forward(self, slots: list[Slot], new: list[Ids]) -> Tensor:
        """Runs a forward pass on the new tokens of B slots, and caches their keys and values.

        Returns the logits at the last new token of each slot, (B, V).
        """
        n = max(map(len, new))
        ids, columns = [], []
        for slot, tokens in zip(slots, new):
            # Padding tokens are on the left. Their keys and values go to the last column of the
            # cache (index -1), which no token attends to.
            padding = n - len(tokens)
            start = len(slot.cached_ids)
            ids.append([0] * padding + tokens)
            columns.append([-1] * padding + [*range(start, start + len(tokens))])
            slot.cached_ids += tokens
        rows = [slot.row for slot in slots]
        self.rows_at_front = rows == [*range(len(rows))]
        self.width = round_up(max(len(slot.cached_ids) for slot in slots))             # C
        self.rows = self.tensor(rows)                                                  # (B,)
        self.columns = self.tensor(columns)                                            # (B, n)
        positions = self.columns.clamp(min=0)                                          # (B, n)
        return self.model(
            input_ids=self.tensor(ids), position_ids=positions,
            attention_mask=self.attention_masks(positions), past_key_values=self.cache,
            use_cache=True, logits_to_keep=1).logits[:, -1]

    def attention_masks(self, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """Creates the additive attention mask of a forward pass.

        Args:
            positions: The position of each new token in its episode, (B, n).

        Returns:
            The mask, (B, 1, n, C), or a dict with one mask for each kind of layer if the model has
            both full and sliding-window attention. An entry is 0 if the new token may attend to the
            column, and otherwise the lowest finite number of the data type.
        """
        distance = positions[:, None, :, None] - torch.arange(self.width, device=positions.device)
        masks = {}
        for kind, window in self.windows.items():
            hidden = (distance < 0) | (distance >= window)
            mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=hidden.device)
            masks[kind] = mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
        return masks if len(masks) > 1 else mask

    def tensor(self, values: list) -> Tensor:
        return torch.tensor(values).to(self.model.device, non_blocking=True)


class KVCacheLayer(CacheLayerMixin):
    """The cached keys and values of one layer, as two tensors of shape (R, H / G, columns, d).

    Both tensors are allocated once, at their full size.
    """
    is_sliding = False  # False for all layers: the attention masks implement the window

    def __init__(self, generator: CachedGenerator):
        super().__init__()
        self.generator = generator

    def lazy_initialization(self, key: Tensor, value: Tensor) -> None:
        rows, columns = self.generator.shape
        # Uninitialised memory may contain NaN. A masked column has an attention weight of 0, but 0
        # times NaN is NaN.
        self.keys = key.new_zeros(rows, key.shape[1], columns, key.shape[3])
        self.values = value.new_zeros(rows, value.shape[1], columns, value.shape[3])
        self.is_initialized = True

    def update(self, key: Tensor, value: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of the new tokens in the cache.

        Args:
            key, value: The keys and values of the new tokens, (B, H / G, n, d) each.

        Returns:
            The keys and values in the first C columns, (B, H / G, C, d) each.
        """
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        generator = self.generator
        self.keys[generator.rows[:, None], :, generator.columns] = key.transpose(1, 2)
        self.values[generator.rows[:, None], :, generator.columns] = value.transpose(1, 2)
        keys = self.keys[:, :, :generator.width]
        values = self.values[:, :, :generator.width]
        if generator.rows_at_front:  # return views, without copying
            return keys[:len(key)], values[:len(key)]
        return keys.index_select(0, generator.rows), values.index_select(0, generator.rows)

    # The following three methods are abstract in the base class.

    def get_seq_length(self) -> int:
        return self.generator.width - self.generator.columns.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.generator.width, 0

    def get_max_length(self) -> int:
        return self.generator.shape[1]


def attend(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, **options):
    """Computes grouped-query attention (GQA), with a faster implementation for decode steps.

    The result equals that of "sdpa", an attention function of transformers. In a decode step
    (n = 1), `attend` treats the G query heads that share a key-value head as G tokens of a single
    query head, (B, H / G, G, d), so that keys and values are not repeated G times in memory.

    Args:
        query: The queries, (B, H, n, d).
        key, value: The keys and values, (B, H / G, C, d) each.
        attention_mask: The additive attention mask, (B, 1, n, C).

    Returns:
        The attention outputs, (B, n, H, d), and None in place of the attention weights.
    """
    if query.shape[2] > 1 or attention_mask is None or attention_mask.shape[1] > 1:
        sdpa = AttentionInterface._global_mapping["sdpa"]
        return sdpa(module, query, key, value, attention_mask, **options)
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    out = F.scaled_dot_product_attention(grouped, key, value, attention_mask,
                                         scale=options.get("scaling"))
    return out.reshape(len(query), 1, query.shape[1], -1), None


AttentionInterface.register("grouped", attend)
AttentionMaskInterface.register("grouped", AttentionMaskInterface._global_mapping["sdpa"])


def round_up(columns: int) -> int:
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def window_sizes(config) -> dict[str, float]:
    """Returns the size of the attention window in tokens, for each kind of layer in a model.

    The size is infinite for "full_attention", and finite for "sliding_attention".
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) or math.inf
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        kinds = ["full_attention" if window == math.inf else "sliding_attention"]
    return {kind: window if kind == "sliding_attention" else math.inf for kind in kinds}


def common_prefix_length(a: Ids, b: Ids) -> int:
    for n, (token, other) in enumerate(zip(a, b)):
        if token != other:
            return n
    return min(len(a), len(b))
