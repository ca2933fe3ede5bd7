"""Replies with keys and values that are kept over an episode's turns: nothing is read twice.

For models of plain causal attention in all layers, on a CPU; it gives what `dpo.replies` gives.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import dpo
from lab.fast import packing

# An opening waits a pass for another one if so many tokens less are read then [ours].
WORTH_WAITING = 32


class Cached:
    """What replies to conversations, answer([(t, random numbers)]) -> [(sampled ids, log_probs)].
    An episode, which its random numbers stand for, has a slot of the cache while it is played. As
    far as an opening begins like what some slot holds, it is copied from there and not read."""

    def __init__(self, model, encoder: dpo.Encoder, sampler: dpo.Sampler, stops: tuple[str, ...],
                 s):
        self.model, self.encoder, self.sampler = model, encoder, sampler
        self.stops, self.s = stops, s
        self.cache = SlotCache(model, s.slots, s.max_tokens)
        self.held = [[] for _ in range(s.slots)]  # the tokens whose keys and values a slot holds
        self.slot_of = {}                         # an episode's random numbers -> its slot

    @torch.inference_mode()
    def __call__(self, asked: list) -> list[tuple[list[int], list[float]]]:
        playing = {rng for _, rng in asked}
        self.slot_of = {rng: slot for rng, slot in self.slot_of.items() if rng in playing}
        free = iter(sorted({*range(self.s.slots)} - {*self.slot_of.values()}))
        new = [rng for _, rng in asked if rng not in self.slot_of]
        self.slot_of |= {rng: next(free) for rng in new}
        rngs = {self.slot_of[rng]: rng for _, rng in asked}
        logits = self.read_pages({slot: t.ids for slot, (t, _) in zip(rngs, asked)},
                                 {self.slot_of[rng] for rng in new})
        replies = {slot: ([], []) for slot in rngs}
        while logits:
            slots = [*logits]
            draw = dpo.Draw([rngs[slot] for slot in slots], self.sampler, -1, lambda ids: False)
            tokens = draw(torch.zeros(len(slots), 0), torch.stack([*logits.values()])).argmax(-1)
            log_probs = draw.log_probs[0].tolist() if draw.log_probs else [0.0] * len(slots)
            live = []
            for slot, token, log_prob in zip(slots, tokens.tolist(), log_probs):
                ids, values = replies[slot]
                ids.append(token)
                values.append(log_prob)
                if not self.over(ids, len(self.held[slot]) + 1):
                    live.append((slot, token))
            logits = self.read(sorted((slot, [token]) for slot, token in live)) if live else {}
        return [replies[slot] if self.sampler.temperature else (replies[slot][0], [])
                for slot in rngs]

    def over(self, ids: list[int], episode: int) -> bool:
        """Whether a reply ends with its last token; episode: its length in tokens by now."""
        return (ids[-1] == self.encoder.end_of_turn or len(ids) == self.s.max_new_tokens
                or episode >= self.s.max_tokens
                or any(stop in self.encoder.decode(ids[-len(stop) - 1:]) for stop in self.stops))

    def read_pages(self, pages: dict[int, list[int]], openings: set[int]) -> dict[int, Tensor]:
        """slot -> logits after all ids of its episode, in passes of at most a few thousand tokens.
        An opening that begins like one of the pass waits for it, and is then copied."""
        logits = {}
        while waiting := [slot for slot in pages if slot not in logits]:
            room, chosen = self.s.tokens_per_forward or 4096, []
            for slot in waiting:
                self.keep_beginning(slot, pages[slot], slot in openings)
            waiting.sort(key=lambda slot: (len(pages[slot]) - len(self.held[slot]), slot))
            for slot in waiting:
                past, ids = len(self.held[slot]), pages[slot]
                if chosen and len(ids) - past > room or slot in openings and any(
                        packing.shared_beginning(ids, pages[other]) >= past + WORTH_WAITING
                        for other in chosen if other in openings):
                    continue
                chosen.append(slot)
                room -= len(ids) - past
            logits |= self.read([(slot, pages[slot][len(self.held[slot]):]) for slot in chosen])
        return logits

    def keep_beginning(self, slot: int, ids: list[int], opening: bool) -> None:
        """Of what a slot holds there remains what `ids` begin with, or what another slot holds of
        that, if it is more. Their last token is read in any case, which gives the logits."""
        own = packing.shared_beginning(self.held[slot], ids[:-1])
        known, source = max((packing.shared_beginning(held, ids[:-1]), n)
                            for n, held in enumerate(self.held)) if opening else (own, slot)
        if known > own:
            self.cache.copy(source, slot, known)
        self.held[slot] = ids[:max(known, own)]

    def read(self, new: list[tuple[int, list[int]]]) -> dict[int, Tensor]:
        """slot -> logits (V,) after its new ids, by one pass."""
        segments = [(slot, len(self.held[slot]), len(ids)) for slot, ids in new]
        self.cache.place(segments)
        device, lengths = self.model.device, [n for *_, n in segments]
        logits = self.model(
            input_ids=torch.tensor([[i for _, ids in new for i in ids]], device=device),
            position_ids=torch.tensor([[past + k for _, past, n in segments for k in range(n)]],
                                      device=device),
            lengths=lengths, cache=self.cache, use_cache=False,
            logits_to_keep=torch.tensor(lengths, device=device).cumsum(0) - 1).logits[0]
        for slot, ids in new:
            self.held[slot] = self.held[slot] + ids
        return {slot: row for (slot, _), row in zip(new, logits)}


class SlotCache:
    """Keys and values of the episodes side by side, one slot each."""

    def __init__(self, model, slots: int, tokens: int):
        c = model.config.get_text_config()
        d = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        self.kv = torch.empty((c.num_hidden_layers, 2, slots, heads, tokens + 1, d),
                              dtype=model.dtype)

    def place(self, segments: list[tuple[int, int, int]]) -> None:
        """Says where the coming N tokens go: segments (slot, past, n), n new tokens after the
        `past` that the slot holds."""
        self.slots, self.positions = (torch.tensor(row) for row in zip(*(  # (N,)
            (slot, past + k) for slot, past, n in segments for k in range(n))))
        # New token j sees the past and the new tokens up to itself.
        self.segments = [(slot, past, n, torch.ones(n, past + n, dtype=torch.bool).tril(past)
                          if past and n > 1 else None) for slot, past, n in segments]

    def copy(self, source: int, slot: int, n: int) -> None:
        """The first n tokens of a slot, into another one."""
        self.kv[:, :, slot, :, :n] = self.kv[:, :, source, :, :n]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float):
        """Adds key and value (1, H_kv, N, d) of the tokens placed; the attention of their query
        (1, H, N, d), each to its own slot up to itself, (1, N, H, d)."""
        keys, values = self.kv[layer]
        keys[self.slots, :, self.positions] = key[0].transpose(0, 1)
        values[self.slots, :, self.positions] = value[0].transpose(0, 1)
        parts, lengths = [], [n for _, _, n, _ in self.segments]
        for (slot, past, n, mask), q in zip(self.segments, query.split(lengths, 2)):
            parts.append(F.scaled_dot_product_attention(
                q, keys[slot, None, :, :past + n], values[slot, None, :, :past + n],
                attn_mask=mask, is_causal=n > 1 and not past, scale=scaling,
                enable_gqa=q.shape[1] != key.shape[1]))
        return torch.cat(parts, 2).transpose(1, 2)
