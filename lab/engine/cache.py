"""Sampling with many episodes side by side: keys and values that are kept over all their turns."""

import itertools
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None

BLOCK = 64  # positions of a slot that are read together [ours]


def slot_cache(model, slots: int, tokens: int) -> "SlotCache":
    """The cache that is fastest where the model is."""
    flash = model.device.type == "cuda" and model.dtype == torch.bfloat16 and (
        "block_table" in (getattr(varlen_attn, "__kwdefaults__", 0) or ()))  # torch >= 2.12
    return (VarlenCache if flash else SlotCache)(model, slots, tokens)


class SlotCache:
    """Keys and values of the episodes side by side, one slot each; `slot_bytes` a token."""

    def __init__(self, model, slots: int, tokens: int):
        layers, heads, d = cache_shape(model.config)
        self.shape, self.tokens, room = [heads, d], tokens, -(-tokens // BLOCK) * BLOCK
        # Zeros: what a block holds beyond a slot's last token is read, with weight 0.
        self.kv = torch.zeros((layers, 2, slots, heads, room, d), dtype=model.dtype,
                              device=model.device)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Its keys (slots, H_kv, d, room) and values (slots, H_kv, room, d)."""
        keys, values = self.kv[layer]
        return keys.view(*keys.shape[:2], *keys.shape[:1:-1]), values

    def place(self, segments: list[tuple[int, int, int]]) -> None:
        """Says where the coming tokens go: segments (slot, past, n), n new tokens after the `past`
        that the slot holds; those of one token come first."""
        device = self.kv.device
        self.seen = set()  # layers of this pass that attended
        single = [(slot, past) for slot, past, n in segments if n == 1]
        self.slots, self.positions = torch.tensor(
            single, dtype=torch.long, device=device).reshape(-1, 2).T                     # (S,)
        # In a longer segment new token j sees the past and the new tokens up to itself.
        self.longer = [(slot, past, n, None if not past else torch.ones(
            n, past + n, dtype=torch.bool, device=device).tril(past))
            for slot, past, n in segments[len(single):]]
        self.blocks = None  # of the single tokens

    def copy(self, source: int, slot: int, n: int) -> None:
        """The first n tokens of a slot, into another one."""
        for layer in range(len(self.kv)):
            keys, values = self.of_layer(layer)
            keys[slot, :, :, :n] = keys[source, :, :, :n]
            values[slot, :, :n] = values[source, :, :n]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float):
        """Adds key and value (1, H_kv, N, d) of the tokens placed; the attention of their query
        (1, H, N, d), each to its own slot up to itself, (1, N, H, d)."""
        if layer in self.seen:
            raise ValueError(f"layer {layer} attends more than once in a pass, and the cache holds "
                             "one set of keys a layer; use a model such as Llama, Qwen2 or Qwen3")
        self.seen.add(layer)
        return self.attend_layer(layer, query, key, value, scaling)

    def attend_layer(self, layer: int, query, key, value, scaling: float) -> Tensor:
        keys, values = self.of_layer(layer)
        H, N, d = query.shape[1:]
        query, key, value = query[0], key[0], value[0]
        out, S = query.new_empty(N, H, d), len(self.slots)                # S single tokens first
        if S:
            keys[self.slots, :, :, self.positions] = key[:, :S].transpose(0, 1)
            values[self.slots, :, self.positions] = value[:, :S].transpose(0, 1)
            out[:S] = self.attend_single(keys, values, query[:, :S].transpose(0, 1) * scaling)
        for slot, past, n, mask in self.longer:
            new, end = slice(S, S + n), past + n
            keys[slot, :, :, past:end], values[slot, :, past:end] = key[:, new].mT, value[:, new]
            k = keys[slot, None, :, :, :end].mT.contiguous() if past else key[None, :, new]
            v = values[slot, None, :, :end]
            if mask is not None and k.is_cuda:  # there a mask and fewer key heads have no kernel
                k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
            out[new] = F.scaled_dot_product_attention(
                query[None, :, new], k, v, attn_mask=mask, is_causal=mask is None, scale=scaling,
                enable_gqa=H != k.shape[1])[0].transpose(0, 1)
            S += n
        return out[None]

    def attend_single(self, keys: Tensor, values: Tensor, query: Tensor) -> Tensor:
        """Attention of one token in each of S slots, (S, H, d), of its scaled query (S, H, d).

        Slots are of uneven length, and a product for each is slow. So keys and values are read as
        tables, in blocks of BLOCK positions of a head: its d rows of keys, weighted by a query, are
        the scores; its rows of values, weighted by their softmax, are the attention.
        """
        S, H, d = query.shape
        self.blocks = self.blocks or self.find_blocks(H)  # the same in all layers
        head, at, most, unseen, key_rows, value_rows, first = self.blocks
        scores = F.embedding_bag(key_rows, keys.view(-1, BLOCK), mode="sum",
                                 per_sample_weights=query.reshape(S * H, d)[head])    # (B, BLOCK)
        scores = scores.masked_fill_(unseen, -torch.inf).to(
            torch.promote_types(scores.dtype, torch.float32))
        padded = scores.new_full((S * H * most, BLOCK), -torch.inf).index_copy_(0, at, scores)
        weights = padded.view(S * H, -1).softmax(-1).view(-1, BLOCK)[at]              # (B, BLOCK)
        return F.embedding_bag(value_rows, values.view(-1, d), first, mode="sum",
                               per_sample_weights=weights.to(values.dtype).flatten()).view(S, H, d)

    def find_blocks(self, H: int) -> tuple:
        """The B blocks that single tokens see, by slot, head of the query (of H) and position.

        Each block's head (B,), counted over all slots; its place (B,) where each head has as many
        as the longest, and that number; its unseen positions (B, BLOCK); its rows of keys (B, d)
        and values (B * BLOCK,), and where in these each head begins (S * H,).
        """
        H_kv, room, d = self.kv.shape[3:]
        count, step = self.positions // BLOCK + 1, torch.arange(room + d, device=self.kv.device)
        most = int(count.max())
        slot, h, block = (step[:most] < count[:, None, None]).expand(-1, H, -1).nonzero().T
        head = slot * H + h
        key_head = self.slots[slot] * H_kv + h // (H // H_kv)
        positions = block[:, None] * BLOCK + step[:BLOCK]
        keys = (key_head * d * (room // BLOCK) + block)[:, None] + step[:d] * (room // BLOCK)
        values = key_head[:, None] * room + positions
        count = count.repeat_interleave(H) * BLOCK
        return (head, head * most + block, most, positions > self.positions[slot, None],
                keys.int(), values.int().flatten(), (count.cumsum(0) - count).int())


class VarlenCache(SlotCache):
    """On a GPU: flash attention over the slots, each a page of its own; pages and single tokens in
    one call a layer. Not run on a GPU yet: a test compares it with the call's documented contract.
    """

    def __init__(self, model, slots: int, tokens: int):
        layers, *self.shape = cache_shape(model.config)
        self.tokens, room = tokens, -(-tokens // 256) * 256  # flash attention's unit of a page
        self.kv = torch.zeros((layers, 2, slots, room, *self.shape), dtype=model.dtype,
                              device=model.device)

    def place(self, segments: list[tuple[int, int, int]]) -> None:
        self.seen = set()
        slots, past, new = zip(*segments)
        ends = [p + n for p, n in zip(past, new)]
        tensor = partial(torch.tensor, device=self.kv.device)
        self.slots = tensor([slot for slot, _, n in segments for _ in range(n)])          # (N,)
        self.positions = tensor([p + k for _, p, n in segments for k in range(n)])        # (N,)
        tensor = partial(tensor, dtype=torch.int32)
        self.how = dict(
            cu_seq_q=tensor([0, *itertools.accumulate(new)]), cu_seq_k=None, max_q=max(new),
            max_k=max(ends), seqused_k=tensor(ends), block_table=tensor(slots)[:, None],
            window_size=(-1, 0), enable_gqa=True)  # causal, the last new token with the last key

    def copy(self, source: int, slot: int, n: int) -> None:
        self.kv[:, :, slot, :n] = self.kv[:, :, source, :n]

    def attend_layer(self, layer: int, query, key, value, scaling: float) -> Tensor:
        keys, values = self.kv[layer]                                       # (slots, room, H_kv, d)
        keys[self.slots, self.positions] = key[0].transpose(0, 1)
        values[self.slots, self.positions] = value[0].transpose(0, 1)
        return varlen_attn(query[0].transpose(0, 1).contiguous(), keys, values, scale=scaling,
                           **self.how)[None]


def next_token_logits(model, cache: SlotCache,
                      segments: list[tuple[int, int, list[int]]]) -> Tensor:
    """One pass over new tokens; float logits after each segment's last one, (S, V). segments:
    (slot, past, new ids) as `SlotCache.place` wants them."""
    device, lengths = model.device, [len(new) for _, _, new in segments]
    ids = torch.tensor([i for _, _, new in segments for i in new], device=device)     # (N,)
    positions = torch.tensor([past + k for _, past, new in segments for k in range(len(new))],
                             device=device)                                           # (N,)
    cache.place([(slot, past, len(new)) for slot, past, new in segments])
    last = torch.tensor(lengths, device=device).cumsum(0) - 1                         # (S,)
    return model(input_ids=ids[None], position_ids=positions[None], lengths=lengths, cache=cache,
                 logits_to_keep=last, use_cache=False).logits[0].float()


def sample(logits: Tensor, temperature: float, draws: list[float] | None) -> Tensor:
    """A token per row of logits (S, V): the best one at temperature 0, else by inverse CDF of one
    uniform number in [0, 1) per row."""
    if temperature == 0:
        return logits.argmax(-1)
    p = (logits / temperature).softmax(-1)
    # First the run of words in which the draw falls, then the word in it.
    runs = F.pad(p, (0, -p.shape[1] % 256)).unflatten(1, (-1, 256))               # (S, runs, 256)
    cdf = F.pad(runs.sum(-1).double().cumsum(-1), (1, 0))                         # (S, 1 + runs)
    u = torch.tensor(draws, dtype=torch.float64, device=p.device)[:, None] * cdf[:, -1:]  # (S, 1)
    run = (cdf[:, 1:] <= u).sum(-1, keepdim=True)
    inside = runs[torch.arange(len(p), device=p.device), run[:, 0]].double().cumsum(-1)  # (S, 256)
    u = torch.minimum(u - cdf.gather(1, run), inside[:, -1:].nextafter(torch.zeros_like(u)))
    return run[:, 0] * 256 + (inside <= u).sum(-1)


def slots_that_fit(free: float, slot: float) -> int:
    """How many slots of `slot` bytes are made in `free` bytes, of which a pass needs some, too."""
    return int(0.8 * free // slot)


def slot_bytes(config, itemsize: int = 2) -> int:
    """Bytes of a token in a slot: layers x 2 x key heads x width of a head x bytes of a number."""
    return 2 * itemsize * math.prod(cache_shape(config))


def cache_shape(config) -> tuple[int, int, int]:
    """(layers, key heads, numbers of a head) of the keys, and of the values, of a token."""
    c = config.get_text_config()
    d = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    return c.num_hidden_layers, heads, d
