"""Multi-turn generation with a KV cache that is kept across turns: no token is prefilled twice.

`Run.make_generator` returns a `CachedGenerator` if the model passes the check in
`engine.self_check`. The cache holds the attention keys and values of all tokens so far, in each
layer:

    column    0    1    2    3    4    5  ...  last
    row 0     a0   a1   a2   a3   a4   -         x     episode a, 5 cached tokens
    row 1     b0   b1   b2   -    -    -         x     episode b, 3 cached tokens
    row 2     -    -    -    -    -    -         x     free

The token at position p of an episode is stored in column p, and it attends to columns 0 to p. There
are no gaps, and adding a token does not move any other token. Padding is written to the last
column, x, which every attention mask hides.

A turn starts with the prefill, which runs the new tokens of all episodes: a prompt or an
observation. Each decode step then runs the last sampled token of all unfinished replies.

Shapes: the cache has R rows. A forward pass runs B of them, with n new tokens each, which attend to
C columns. V is the vocabulary size. There are H query heads of size d, and each key-value head
serves G of them.
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

COLUMN_MULTIPLE = 16  # C is a multiple of this, because kernels prefer round sizes [ours]


@dataclass
class Slot:
    """An episode in the cache, identified by the random number generator of its reply."""
    reply: Reply     # the reply of the current turn
    row: int         # the row of the cache
    cached_ids: Ids  # the tokens whose keys and values are stored in this row


class CachedGenerator:
    """Generates replies: generator([(trajectory, rng)]) returns [(ids, log_probs)].

    Args:
        model: A causal language model with full or sliding-window attention in all layers.
        token_sampler: The function that samples a token.
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
        self.shape = (slots, round_up(max_tokens + 1))  # (R, columns), with one column for padding
        self.used = []                                  # the slots that hold an episode
        # The reference is weak, since a cycle would keep the cache in memory after its last use.
        self.cache = Cache(layer_class_to_replicate=partial(KVCacheLayer, proxy(self)))
        self.windows = window_sizes(model.config)

    @torch.inference_mode()
    def __call__(self, requests: list) -> list[Sampled]:
        # 1. Free the slots of episodes that have ended, and assign slots to new episodes.
        contexts = {rng: t.ids for t, rng in requests}
        del self.used[self.move_to_front(lambda slot: slot.reply.rng in contexts):]
        cached = {slot.reply.rng for slot in self.used}
        new = [rng for rng in contexts if rng not in cached]
        self.used += [Slot(Reply(rng), row, []) for row, rng in enumerate(new, len(self.used))]

        # 2. Prefill all tokens that are not in the cache yet: the prompt or observation, and the
        # last token of the previous reply, which was sampled but not run yet.
        uncached = []
        for slot in self.used:
            ids = contexts[slot.reply.rng]
            # The previous reply may have been cut at a stop string after it was sampled. At least
            # one token has to run, because its logits predict the first token of the reply.
            slot.cached_ids = slot.cached_ids[:common_prefix_length(slot.cached_ids, ids[:-1])]
            slot.reply = Reply(slot.reply.rng)
            uncached.append(ids[len(slot.cached_ids):])
        self.append_sampled(self.prefill(uncached))

        # 3. Decode token by token. Finished replies move to the back, where they cost nothing.
        while count := self.move_to_front(lambda slot: not slot.reply.done):
            slots = self.used[:count]
            self.append_sampled(self.forward(slots, [slot.reply.ids[-1:] for slot in slots]))
        replies = {slot.reply.rng: slot.reply for slot in self.used}
        return [(replies[rng].ids, replies[rng].log_probs) for rng in contexts]

    def move_to_front(self, wanted: Callable[[Slot], bool]) -> int:
        """Moves the slots that satisfy `wanted` to the front, and returns how many there are.

        The rows of the cache move along, so a forward pass on the first slots needs no copy of
        their keys and values.
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
        """Runs the uncached tokens of all used slots, at most PREFILL_CHUNK of each at a time.

        Returns:
            The logits at the last token of each used slot, (number of used slots, V).
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
        """Samples one token from the logits, (B, V), for the reply of each of the first B slots."""
        slots = self.used[:len(logits)]
        self.token_sampler([slot.reply for slot in slots], logits)
        for slot in slots:
            sampled = len(slot.reply.ids)
            full = len(slot.cached_ids) + 1 >= self.max_tokens or sampled == self.max_new_tokens
            slot.reply.done = slot.reply.done or full

    def forward(self, slots: list[Slot], new: list[Ids]) -> Tensor:
        """Runs the new tokens of B slots in one forward pass, and caches their keys and values.

        Returns:
            The logits at the last token of each slot, (B, V).
        """
        n = max(map(len, new))
        ids, columns = [], []
        for slot, tokens in zip(slots, new):
            padding = n - len(tokens)  # padding on the left, which is written to the last column
            start = len(slot.cached_ids)
            ids.append([0] * padding + tokens)
            columns.append([-1] * padding + [*range(start, start + len(tokens))])
            slot.cached_ids = slot.cached_ids + tokens
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
        """Makes the additive attention mask of tokens at the given positions, (B, n).

        Returns:
            The mask, (B, 1, n, C). It is 0 if the token attends to the column, and the lowest
            finite number otherwise. A model with several kinds of layers, such as full and
            sliding-window attention, gets a dict with one mask for each kind.
        """
        distance = positions[:, None, :, None] - torch.arange(self.width, device=positions.device)
        masks = {}
        for kind, window in self.windows.items():
            hidden = (distance < 0) | (distance >= window) if window < self.width else distance < 0
            mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=hidden.device)
            masks[kind] = mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
        return masks if len(masks) > 1 else mask

    def tensor(self, values: list) -> Tensor:
        return torch.tensor(values).to(self.model.device, non_blocking=True)


class KVCacheLayer(CacheLayerMixin):
    """The keys and values of a layer, (R, H / G, columns, d) each, allocated once at full size."""
    is_sliding = False  # the masks alone implement sliding windows

    def __init__(self, generator: CachedGenerator):
        super().__init__()
        self.generator = generator  # has the rows and columns of the current forward pass

    def lazy_initialization(self, key: Tensor, value: Tensor) -> None:
        rows, columns = self.generator.shape
        # Zeros, because a hidden column has weight 0, and 0 times an uninitialised NaN is NaN.
        self.keys = key.new_zeros(rows, key.shape[1], columns, key.shape[3])
        self.values = value.new_zeros(rows, value.shape[1], columns, value.shape[3])
        self.is_initialized = True

    def update(self, key: Tensor, value: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of the new tokens, (B, H / G, n, d) each.

        Returns:
            All keys and values that the new tokens may attend to, (B, H / G, C, d) each.
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

    # The base class requires the following three methods.

    def get_seq_length(self) -> int:
        return self.generator.width - self.generator.columns.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.generator.width, 0

    def get_max_length(self) -> int:
        return self.generator.shape[1]


def attend(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, **options):
    """Computes grouped-query attention as transformers does, but faster in a decode step.

    There, the G queries that share a key-value head form one block, (B, H / G, G, d), so no key is
    loaded or copied G times.

    Args:
        module: The attention layer.
        query: The queries, (B, H, n, d).
        key, value: The keys and values, (B, H / G, C, d) each.
        attention_mask: The additive mask, (B, 1, n, C).
        options: Further arguments from transformers.

    Returns:
        The outputs, (B, n, H, d), and None in place of the attention weights.
    """
    mask = attention_mask
    if query.shape[2] > 1 or mask is None or mask.shape[1] > 1:
        sdpa = AttentionInterface._global_mapping["sdpa"]
        return sdpa(module, query, key, value, mask, **options)
    grouped = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    out = F.scaled_dot_product_attention(grouped, key, value, mask, scale=options.get("scaling"))
    return out.reshape(len(query), 1, query.shape[1], -1), None


AttentionInterface.register("grouped", attend)
AttentionMaskInterface.register("grouped", AttentionMaskInterface._global_mapping["sdpa"])


def round_up(columns: int) -> int:
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def window_sizes(config) -> dict[str, float]:
    """Returns a dict that maps each kind of layer to its attention window in tokens.

    The window of full attention is infinite.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) or math.inf
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        kinds = ["full_attention" if window == math.inf else "sliding_attention"]
    return {kind: window if kind == "sliding_attention" else math.inf for kind in kinds}


def common_prefix_length(a: Ids, b: Ids) -> int:
    """Returns the length of the longest common prefix of two sequences."""
    for n, (token, other) in enumerate(zip(a, b)):
        if token != other:
            return n
    return min(len(a), len(b))
