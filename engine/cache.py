"""Sampling with many episodes side by side: keys and values that are kept over all their turns."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


class SlotCache:
    """Keys and values of the episodes side by side, one slot each.

    Bytes: layers x 2 x slots x key heads x tokens x width of a head x bytes of a number, so 19 GB
    for 36 layers, 32 slots, 8 heads, 4,096 tokens, 128 wide, in bf16.
    """

    def __init__(self, model, slots: int, tokens: int):
        layers, heads, d = cache_shape(model.config)
        self.tokens = tokens
        self.kv = torch.empty((layers, 2, slots, heads, tokens, d), dtype=model.dtype,
                              device=model.device)

    def place(self, segments: list[tuple[int, int, int]]) -> None:
        """Says where the coming tokens go.

        segments: (slot, past, n), n new tokens after the `past` that the slot holds; those of one
        token come first.
        """
        device = self.kv.device
        self.seen = set()  # layers of this pass that attended
        self.single = [(slot, past) for slot, past, n in segments if n == 1]
        at = torch.tensor(self.single, dtype=torch.long, device=device).reshape(-1, 2)   # (S, 2)
        self.slots, self.positions = at.T
        # In a longer segment new token j sees the past and the new tokens up to itself.
        self.longer = [(slot, past, n, None if not past else torch.ones(
            n, past + n, dtype=torch.bool, device=device).tril(past))
            for slot, past, n in segments[len(self.single):]]

    def copy(self, source: int, slot: int, n: int) -> None:
        """The first n tokens of a slot, into another one."""
        self.kv[:, :, slot, :, :n] = self.kv[:, :, source, :, :n]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float):
        """Adds key and value (1, H_kv, N, d) of the tokens placed; their attention, (1, N, H, d).

        query (1, H, N, d). Each token sees what its own slot holds, up to itself. ValueError if
        a layer attends twice in a pass: it has one place for its keys.
        """
        if layer in self.seen:
            raise ValueError(f"layer {layer} attends more than once in a pass, and the cache holds "
                             "one set of keys a layer; use a model such as Llama, Qwen2 or Qwen3")
        self.seen.add(layer)
        keys, values = self.kv[layer]                                     # (slots, H_kv, T, d)
        H, N, d = query.shape[1:]
        query, key, value = query[0], key[0], value[0]
        out, S = query.new_empty(N, H, d), len(self.single)               # S single tokens first
        keys[self.slots, :, self.positions] = key[:, :S].transpose(0, 1)
        values[self.slots, :, self.positions] = value[:, :S].transpose(0, 1)
        # Single tokens: the query heads that share a key head are rows of one product.
        q = (query[:, :S] * scaling).transpose(0, 1).reshape(
            S, keys.shape[1], H // keys.shape[1], d)
        for (slot, past), part, result in zip(self.single, q, out[:S].view_as(q)):
            k, v = keys[slot, :, :past + 1], values[slot, :, :past + 1]   # (H_kv, n, d)
            scores = torch.bmm(part, k.mT)
            weights = scores.softmax(-1, torch.promote_types(scores.dtype, torch.float32))
            torch.bmm(weights.to(v.dtype), v, out=result)
        for slot, past, n, mask in self.longer:
            new, end = slice(S, S + n), past + n
            keys[slot, :, past:end], values[slot, :, past:end] = key[:, new], value[:, new]
            k, v = keys[slot, None, :, :end], values[slot, None, :, :end]
            if mask is not None and k.is_cuda:  # there a mask and fewer key heads have no kernel
                k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
            out[new] = F.scaled_dot_product_attention(
                query[None, :, new], k, v, attn_mask=mask, is_causal=mask is None, scale=scaling,
                enable_gqa=H != k.shape[1])[0].transpose(0, 1)
            S += n
        return out[None]


def next_token_logits(model, cache: SlotCache,
                      segments: list[tuple[int, int, list[int]]]) -> Tensor:
    """One pass over new tokens; float logits after each segment's last one, (S, V).

    segments: (slot, past, new ids) as `SlotCache.place` wants them. Their keys and values are in
    the cache afterwards.
    """
    device, lengths = model.device, [len(new) for _, _, new in segments]
    ids = torch.tensor([i for _, _, new in segments for i in new], device=device)     # (N,)
    positions = torch.tensor([past + k for _, past, new in segments for k in range(len(new))],
                             device=device)                                           # (N,)
    cache.place([(slot, past, len(new)) for slot, past, new in segments])
    last = torch.tensor(lengths, device=device).cumsum(0) - 1                         # (S,)
    return model(input_ids=ids[None], position_ids=positions[None], lengths=lengths, cache=cache,
                 logits_to_keep=last, use_cache=False).logits[0].float()


def sample(logits: Tensor, temperature: float, draws: list[float] | None) -> Tensor:
    """A token per row of logits (S, V): the best one at temperature 0, else by inverse CDF.

    draws: one uniform number in [0, 1) per row, from the episode's own generator.
    """
    if temperature == 0:
        return logits.argmax(-1)
    cdf = torch.softmax(logits.double() / temperature, -1).cumsum(-1)                 # (S, V)
    u = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * cdf[:, -1:]
    return (cdf <= u).sum(-1)


# ---------------------------------------------------------------------------------- its size


def slots_that_fit(free: float, slot: float) -> int:
    """How many slots of so many bytes are made in `free` bytes, which a pass needs as well."""
    return int(0.8 * free // slot)


def slot_bytes(config, itemsize: int = 2) -> int:
    """Bytes that a token takes in a slot, bf16 if not said otherwise."""
    return 2 * itemsize * math.prod(cache_shape(config))


def cache_shape(config) -> tuple[int, int, int]:
    """(layers, key heads, numbers of a head) of the keys, and of the values, of a token."""
    c = config.get_text_config()
    d = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    return c.num_hidden_layers, heads, d
