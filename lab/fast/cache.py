"""Replies with keys and values that are kept over an episode's turns: nothing is read twice.

For models of plain causal attention in all layers, on a CPU; it gives what `dpo.replies` gives.
"""

import random

import torch
import torch.nn.functional as F
from torch import Tensor

import dpo
from lab.fast import packing

# An opening waits a pass for another one if so many tokens less are read then [ours].
WORTH_WAITING = 32
PASS = 4096  # tokens of a pass that reads, where no setting says it [ours]


class Cached:
    """What replies to conversations: answer([(trajectory, random numbers)]) -> [(ids, log_probs)].

    An episode, which its random numbers stand for, has a slot of the cache while it is played. As
    far as an opening begins like what some slot holds, it is copied from there and not read.

    Args:
        model: A model with the attention "ragged".
        encoder: Of its tokenizer.
        sampler: The distribution that is sampled from.
        stops: Texts that end a reply.
        s: Settings; slots, max_tokens, max_new_tokens and tokens_per_forward are asked for.
    """

    def __init__(self, model, encoder: dpo.Encoder, sampler: dpo.Sampler, stops: tuple[str, ...],
                 s):
        self.model = model
        self.encoder = encoder
        self.sampler = sampler
        self.stops = stops
        self.s = s
        self.cache = SlotCache(model, s.slots, s.max_tokens)
        self.held = [[] for _ in range(s.slots)]  # the tokens whose keys and values a slot holds
        self.slot_of = {}                         # an episode's random numbers -> its slot

    @torch.inference_mode()
    def __call__(self, asked: list) -> list[tuple[list[int], list[float]]]:
        new = self.give_slots([rng for _, rng in asked])
        pages, rngs = {}, {}  # slot -> the ids of its episode so far, and its random numbers
        for t, rng in asked:
            slot = self.slot_of[rng]
            pages[slot] = t.ids
            rngs[slot] = rng

        replies = {slot: ([], []) for slot in pages}  # ids and log-probabilities
        logits = self.read_pages(pages, new)
        while logits:
            drawn = self.draw(logits, rngs, replies)
            logits = self.read(sorted(drawn)) if drawn else {}
        return [replies[slot] for slot in pages]

    def give_slots(self, rngs: list[random.Random]) -> set[int]:
        """Gives each episode that has just begun a slot that nobody plays in; the set of these."""
        playing = set(rngs)
        self.slot_of = {rng: slot for rng, slot in self.slot_of.items() if rng in playing}
        free = sorted({*range(self.s.slots)} - {*self.slot_of.values()})
        new = set()
        for rng in rngs:
            if rng not in self.slot_of:
                self.slot_of[rng] = free.pop(0)
                new.add(self.slot_of[rng])
        return new

    def draw(self, logits: dict[int, Tensor], rngs: dict[int, random.Random],
             replies: dict[int, tuple]) -> list[tuple[int, list[int]]]:
        """Adds a token to each of these slots' replies; (slot, [token]) of those that go on."""
        slots = list(logits)
        draw = dpo.Draw([rngs[slot] for slot in slots], self.sampler, self.encoder, self.stops)
        draw.replies = [replies[slot] for slot in slots]
        draw(None, torch.stack(list(logits.values())))

        going_on = []
        for slot, over in zip(slots, draw.over):
            reply, _ = replies[slot]
            full = len(self.held[slot]) + 1 >= self.s.max_tokens
            if not (over or full or len(reply) == self.s.max_new_tokens):
                going_on.append((slot, reply[-1:]))
        return going_on

    def read_pages(self, pages: dict[int, list[int]], openings: set[int]) -> dict[int, Tensor]:
        """slot -> logits after all ids of its episode, in passes of at most a few thousand tokens.
        An opening that begins like one of the pass waits for it, and is then copied."""
        logits = {}
        while waiting := [slot for slot in pages if slot not in logits]:
            for slot in waiting:
                self.keep_beginning(slot, pages[slot], slot in openings)
            waiting.sort(key=lambda slot: (len(pages[slot]) - len(self.held[slot]), slot))

            chosen = []
            room = self.s.tokens_per_forward or PASS
            for slot in waiting:
                size = len(pages[slot]) - len(self.held[slot])
                chosen_openings = [pages[other] for other in chosen if other in openings]
                if chosen and size > room:
                    continue
                if slot in openings and self.waits(slot, pages[slot], chosen_openings):
                    continue
                chosen.append(slot)
                room -= size
            logits |= self.read([(slot, pages[slot][len(self.held[slot]):]) for slot in chosen])
        return logits

    def waits(self, slot: int, ids: list[int], openings: list[list[int]]) -> bool:
        """Whether an opening shares so much with others that it is read after them."""
        worth = len(self.held[slot]) + WORTH_WAITING
        return any(packing.shared_beginning(ids, other) >= worth for other in openings)

    def keep_beginning(self, slot: int, ids: list[int], is_opening: bool) -> None:
        """Of what a slot holds there remains what `ids` begin with, or what another slot holds of
        that, if it is more. Their last token is read in any case, which gives the logits."""
        own = packing.shared_beginning(self.held[slot], ids[:-1])
        best = own
        source = slot
        if is_opening:
            for other, held in enumerate(self.held):
                alike = packing.shared_beginning(held, ids[:-1])
                if alike > best:
                    best = alike
                    source = other
        if best > own:
            self.cache.copy(source, slot, best)
        self.held[slot] = ids[:best]

    def read(self, new: list[tuple[int, list[int]]]) -> dict[int, Tensor]:
        """slot -> logits (V,) after its new ids, by one pass."""
        ids, positions, segments = [], [], []
        for slot, more in new:
            past = len(self.held[slot])
            ids += more
            positions += range(past, past + len(more))
            segments.append((slot, past, len(more)))
        self.cache.place(segments)

        device = self.model.device
        lengths = [n for _, _, n in segments]
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        logits = self.model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device), lengths=lengths,
            cache=self.cache, use_cache=False, logits_to_keep=last).logits[0]
        found = {}
        for (slot, more), row in zip(new, logits):
            self.held[slot] = self.held[slot] + more
            found[slot] = row
        return found


class SlotCache:
    """Keys and values of the episodes side by side, one slot each."""

    def __init__(self, model, slots: int, tokens: int):
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None)
        size = size or config.hidden_size // config.num_attention_heads
        self.kv = torch.empty((config.num_hidden_layers, 2, slots, heads, tokens + 1, size),
                              dtype=model.dtype)

    def place(self, segments: list[tuple[int, int, int]]) -> None:
        """Says where the coming N tokens go: segments (slot, past, n), n new tokens after the
        `past` that the slot holds."""
        slots, positions = [], []
        self.segments = []
        for slot, past, n in segments:
            slots += [slot] * n
            positions += range(past, past + n)
            mask = None
            if past and n > 1:  # new token j sees the past and the new tokens up to itself
                mask = torch.ones(n, past + n, dtype=torch.bool).tril(past)
            self.segments.append((slot, past, n, mask))
        self.slots = torch.tensor(slots)          # (N,)
        self.positions = torch.tensor(positions)  # (N,)

    def copy(self, source: int, slot: int, n: int) -> None:
        """The first n tokens of a slot, into another one."""
        self.kv[:, :, slot, :, :n] = self.kv[:, :, source, :, :n]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float):
        """Adds key and value (1, H_kv, N, d) of the tokens placed; the attention of their query
        (1, H, N, d), each to its own slot up to itself, (1, N, H, d)."""
        keys, values = self.kv[layer]
        keys[self.slots, :, self.positions] = key[0].transpose(0, 1)
        values[self.slots, :, self.positions] = value[0].transpose(0, 1)

        outputs = []
        queries = query.split([n for _, _, n, _ in self.segments], 2)
        for (slot, past, n, mask), q in zip(self.segments, queries):
            known = past + n
            outputs.append(F.scaled_dot_product_attention(
                q, keys[slot, None, :, :known], values[slot, None, :, :known], attn_mask=mask,
                is_causal=n > 1 and not past, scale=scaling,
                enable_gqa=q.shape[1] != key.shape[1]))
        return torch.cat(outputs, 2).transpose(1, 2)
