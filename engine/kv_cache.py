"""Replies in conversations that go on: what a model has read of an episode, it never reads again.

`Run.answer` replies with `CachedGenerator`, if `engine.self_check` has found that it serves the model. A row of the
cache is an episode that is being played, a column is a place in it: token p stands in column p and
sees columns 0 to p. There are no gaps, and nothing is moved when a token is added.

Shapes: R rows, of which B are run; n new tokens of each, which see C columns; V words; H heads for
queries, G of them for each head of keys.
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

STEP = 16  # columns are seen in multiples of it, since kernels like round sizes [ours]


@dataclass
class Row:
    """An episode: its reply, whose random numbers it is known by, and what has been read of it."""
    reply: Reply
    place: int  # in the cache
    held: Ids   # the tokens whose keys and values are there


class CachedGenerator:
    """What replies to conversations: answer([(trajectory, random numbers)]) -> [(ids, log_probs)].

    Args:
        model: A model of plain or windowed attention in all layers.
        draw: What draws a token.
        slots: How many conversations go on at once, at most.
        max_tokens: Of a conversation, at most.
        max_new_tokens: Of a reply, at most.
        tokens: Of a pass that reads, at most, with padding.
    """

    def __init__(self, model, draw: TokenSampler, slots: int, max_tokens: int, max_new_tokens: int,
                 tokens: int):
        if model.config._attn_implementation == "sdpa":
            model.set_attn_implementation("grouped")
        self.model = model
        self.draw = draw
        self.max_tokens = max_tokens
        self.max_new_tokens = max_new_tokens
        self.tokens = tokens
        self.shape = (slots, round_up(max_tokens + 1))  # (R, columns); the last one takes padding
        self.rows = []                                 # in use
        # A reference that does not count, else the cache would outlive whoever uses it.
        self.cache = Cache(layer_class_to_replicate=partial(Layer, proxy(self)))
        self.windows = window_sizes(model.config)

    @torch.inference_mode()
    def __call__(self, asked: list) -> list[Sampled]:
        # Rows of episodes that have ended are given to others.
        told = {rng: t.ids for t, rng in asked}
        del self.rows[self.to_front(lambda row: row.reply.rng in told):]
        known = {row.reply.rng for row in self.rows}
        come = [rng for rng in told if rng not in known]
        self.rows += [Row(Reply(rng), place, []) for place, rng in enumerate(come, len(self.rows))]

        # All that is new is read: observations, and of what the model wrote the last token.
        new = []
        for row in self.rows:
            ids = told[row.reply.rng]
            row.held = row.held[:common_prefix_length(row.held, ids[:-1])]  # a reply may have been cut
            row.reply = Reply(row.reply.rng)
            new.append(ids[len(row.held):])
        self.write(self.read(new))

        # Then a token at a time. Rows that are over stand behind the others, and cost nothing.
        while count := self.to_front(lambda row: not row.reply.done):
            rows = self.rows[:count]
            self.write(self.run(rows, [row.reply.ids[-1:] for row in rows]))
        replies = {row.reply.rng: row.reply for row in self.rows}
        return [(replies[rng].ids, replies[rng].log_probs) for rng in told]

    def to_front(self, wanted: Callable[[Row], bool]) -> int:
        """Lets rows change places until those that are wanted come first; how many these are."""
        count = sum(map(wanted, self.rows))
        leave = [n for n, row in enumerate(self.rows[:count]) if not wanted(row)]
        come = [n for n, row in enumerate(self.rows[count:], count) if wanted(row)]
        for a, b in zip(leave, come):
            self.rows[a], self.rows[b] = self.rows[b], self.rows[a]
        if leave:
            width = max(len(row.held) for row in self.rows)
            to = self.tensor(leave + come)
            of = self.tensor(come + leave)
            for layer in self.cache.layers:
                for kept in layer.keys[:, :, :width], layer.values[:, :, :width]:
                    kept.index_copy_(0, to, kept.index_select(0, of))
            for place, row in enumerate(self.rows):
                row.place = place
        return count

    def read(self, new: list[Ids]) -> Tensor:
        """Reads the new tokens of all rows, chunk by chunk. The logits after them, (R, V)."""
        logits = [None] * len(new)
        for first in range(0, max(map(len, new)), PREFILL_CHUNK):
            waiting = [n for n, ids in enumerate(new) if len(ids) > first]
            chunks = [new[n][first:first + PREFILL_CHUNK] for n in waiting]
            for one in batch_by_length([len(chunk) for chunk in chunks], self.tokens):
                rows = [self.rows[waiting[n]] for n in one]
                for n, row in zip(one, self.run(rows, [chunks[n] for n in one])):
                    logits[waiting[n]] = row
        return torch.stack(logits)

    def write(self, logits: Tensor) -> None:
        """Adds a token to the reply of each of the first rows, by logits (B, V)."""
        rows = self.rows[:len(logits)]
        self.draw([row.reply for row in rows], logits)
        for row in rows:
            written = len(row.reply.ids)
            full = len(row.held) + 1 >= self.max_tokens or written == self.max_new_tokens
            row.reply.done = row.reply.done or full

    def run(self, rows: list[Row], new: list[Ids]) -> Tensor:
        """Runs the new tokens of some rows; the logits after them, (B, V)."""
        n = max(map(len, new))
        ids, columns = [], []
        for row, more in zip(rows, new):
            padding = n - len(more)  # in front of the tokens; it goes to the last column
            ids.append([0] * padding + more)
            columns.append([-1] * padding + [*range(len(row.held), len(row.held) + len(more))])
            row.held = row.held + more
        places = [row.place for row in rows]
        self.are_first = places == [*range(len(places))]
        self.width = round_up(max(len(row.held) for row in rows))                       # C
        self.places = self.tensor(places)                                              # (B,)
        self.columns = self.tensor(columns)                                            # (B, n)
        positions = self.columns.clamp(min=0)                                          # (B, n)
        return self.model(
            input_ids=self.tensor(ids), position_ids=positions,
            attention_mask=self.masks(positions), past_key_values=self.cache, use_cache=True,
            logits_to_keep=1).logits[:, -1]

    def masks(self, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """What is added to the scores of tokens at these positions, (B, 1, n, C): nothing where
        they see. If layers are of several kinds: kind -> its mask."""
        ago = positions[:, None, :, None] - torch.arange(self.width, device=positions.device)
        masks = {}
        for kind, window in self.windows.items():
            unseen = (ago < 0) | (ago >= window) if window < self.width else ago < 0
            mask = torch.zeros(unseen.shape, dtype=self.model.dtype, device=unseen.device)
            masks[kind] = mask.masked_fill_(unseen, torch.finfo(mask.dtype).min)
        return masks if len(masks) > 1 else mask

    def tensor(self, values: list) -> Tensor:
        return torch.tensor(values).to(self.model.device, non_blocking=True)


class Layer(CacheLayerMixin):
    """Keys and values of one layer, (R, H / G, columns, d) each, with room for all that comes."""
    is_sliding = False  # windows are a matter of masks alone

    def __init__(self, at: CachedGenerator):
        super().__init__()
        self.at = at  # what says where the new tokens go

    def lazy_initialization(self, key: Tensor, value: Tensor) -> None:
        rows, columns = self.at.shape
        # Zeros, since what a mask hides has to be a number.
        self.keys = key.new_zeros(rows, key.shape[1], columns, key.shape[3])
        self.values = value.new_zeros(rows, value.shape[1], columns, value.shape[3])
        self.is_initialized = True

    def update(self, key: Tensor, value: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        """Adds those of new tokens, (B, H / G, n, d); those of all that they may see, with C for n.
        """
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        at = self.at
        self.keys[at.places[:, None], :, at.columns] = key.transpose(1, 2)
        self.values[at.places[:, None], :, at.columns] = value.transpose(1, 2)
        keys = self.keys[:, :, :at.width]
        values = self.values[:, :, :at.width]
        if at.are_first:
            return keys[:len(key)], values[:len(key)]
        return keys.index_select(0, at.places), values.index_select(0, at.places)

    def get_seq_length(self) -> int:
        return self.at.width - self.at.columns.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.at.width, 0

    def get_max_length(self) -> int:
        return self.at.shape[1]


def attend(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, **options):
    """Attention of transformers, but for one new token of each row: there the G queries of a head
    of keys stand side by side, (B, H / G, G, d), so that no key is read or copied G times."""
    mask = attention_mask
    if query.shape[2] > 1 or mask is None or mask.shape[1] > 1:
        sdpa = AttentionInterface._global_mapping["sdpa"]
        return sdpa(module, query, key, value, mask, **options)
    queries = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    found = F.scaled_dot_product_attention(queries, key, value, mask, scale=options.get("scaling"))
    return found.reshape(len(query), 1, query.shape[1], -1), None


AttentionInterface.register("grouped", attend)
AttentionMaskInterface.register("grouped", AttentionMaskInterface._global_mapping["sdpa"])


def round_up(columns: int) -> int:
    return -(-columns // STEP) * STEP


def window_sizes(config) -> dict[str, float]:
    """kind of layer -> how many tokens back it sees."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) or math.inf
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        kinds = ["full_attention" if window == math.inf else "sliding_attention"]
    return {kind: window if kind == "sliding_attention" else math.inf for kind in kinds}


def common_prefix_length(a: Ids, b: Ids) -> int:
    """How many tokens both begin with."""
    for n, (token, other) in enumerate(zip(a, b)):
        if token != other:
            return n
    return min(len(a), len(b))
