"""Sampling: the distribution that agents draw from, one token drawn, and replies by `generate`.

`engine.kv_cache` draws with it too, and is faster; `replies` serves every model that it does not.
"""

import math
import random
from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dpo import Ids, in_fp32

Sampled = tuple[Ids, list[float]]  # a reply: its ids, and the log-probability of each


class Sampler:
    """The distribution that an agent samples from: softmax(logits / temperature) over the tokens
    that are not in `never`. As it stands it is the model's own, over the whole vocabulary.

    Tokens that are never drawn are never pushed down either. If log-probabilities counted them,
    their mass would grow with each push on the others.

    Args:
        temperature: 0: the most probable token, for certain.
        suppressed_ids: Ids that are not drawn.
        known: Ids from here on are not drawn either; another model may have more of them.
    """

    def __init__(self, temperature: float = 1.0, suppressed_ids: tuple[int, ...] = (),
                 vocabulary_size: int | None = None):
        self.temperature = temperature
        self.suppressed_ids = suppressed_ids
        self.vocabulary_size = vocabulary_size
        self.index = {}  # (device, V) -> what is never drawn: the host waits for each copy

    def process_logits(self, logits: Tensor) -> Tensor:
        """Of a model's logits, (..., V), what has the distribution as its softmax, float32."""
        logits = in_fp32(logits)
        if self.temperature not in (0, 1):
            logits = logits / self.temperature
        if not self.suppressed_ids:
            return logits
        key = logits.device, logits.shape[-1]
        if key not in self.index:
            more = range(self.vocabulary_size or key[1], key[1])
            with torch.inference_mode(False):  # else what is sampled first could not be trained on
                self.index[key] = torch.tensor([*self.suppressed_ids, *more], device=logits.device)
        return logits.index_fill(-1, self.index[key], -torch.inf)


@dataclass
class Reply:
    """A reply as far as it has come."""
    rng: random.Random  # of its episode alone, so that what runs beside it changes nothing
    ids: Ids = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # of each, but for a greedy sampler
    done: bool = False


class TokenSampler:
    """Draws the next token of some replies.

    Args:
        sampler: The distribution.
        encoder: An `engine.chat.Encoder`.
        stops: Texts that end a reply, as the end of turn does.
    """

    def __init__(self, sampler: Sampler, encoder, stops: tuple[str, ...]):
        self.sampler = sampler
        self.encoder = encoder
        self.stops = stops
        self.may_end = {}  # token -> whether a stop may end with it

    def __call__(self, replies: list[Reply], logits: Tensor) -> Tensor:
        """Adds a token to each reply that is not over. The host waits once, to learn the tokens.

        Args:
            replies: B of them.
            logits: (B, V), of each one's next token.

        Returns:
            The tokens, (B, 1); the end of turn where a reply is over.
        """
        log_p = self.sampler.process_logits(logits).log_softmax(-1)                       # (B, V)
        u = self.uniform(replies).to(log_p.device, non_blocking=True)             # (B, 1)
        if self.sampler.temperature > 0:
            # The first token at which the distribution function exceeds u. Rounding leaves its
            # last value not quite 1.
            cdf = log_p.exp().double().cumsum(-1)                                 # (B, V)
            drawn = (cdf <= cdf[:, -1:] * u).sum(-1, keepdim=True)                # (B, 1)
        else:
            drawn = log_p.argmax(-1, keepdim=True)                                # (B, 1)
        values = log_p.gather(1, drawn)                                           # (B, 1)
        drawn = drawn.masked_fill(u < 0, self.encoder.end_of_turn)
        known = torch.cat([drawn.double(), values.double()], 1).tolist()          # (B, 2)
        for reply, (token, value) in zip(replies, known):
            if not reply.done:
                self.add(reply, int(token), value)
        return drawn

    def uniform(self, replies: list[Reply]) -> Tensor:
        """A random number in [0, 1) of each reply, (B, 1); -1 of one that is over, which goes on
        drawing nothing: its episode's later turns have the same random numbers."""
        numbers = []
        for reply in replies:
            if reply.done:
                numbers.append(-1.0)
            elif self.sampler.temperature > 0:
                numbers.append(reply.rng.random())
            else:
                numbers.append(0.0)
        return torch.tensor(numbers, dtype=torch.float64)[:, None]

    def add(self, reply: Reply, token: int, log_prob: float) -> None:
        """Adds a token to a reply, and finds out whether it is over."""
        if not math.isfinite(log_prob):
            raise FloatingPointError("logits that are no numbers")
        reply.ids.append(token)
        if self.sampler.temperature > 0:
            reply.log_probs.append(log_prob)
        reply.done = token == self.encoder.end_of_turn or self.stops_at(reply.ids)

    def stops_at(self, ids: Ids) -> bool:
        """Whether a stop ends with the last token of these ids. Few tokens can end one, so that
        few are looked at twice."""
        last = ids[-1]
        if last not in self.may_end:
            text = self.encoder.decode([last])  # of a part of a character it is U+FFFD
            self.may_end[last] = any(s[-1] in text or "\N{REPLACEMENT CHARACTER}" in text
                                     for s in self.stops)
        if not self.may_end[last]:
            return False
        # Of a stop's text each token has a letter at least.
        return any(stop in self.encoder.decode(ids[-len(stop) - 1:]) for stop in self.stops)


# ------------------------------------------------------------------------------- by `generate`

PREFILL_CHUNK = 1024  # tokens of each text that are read at a time, since a mask grows with its square


@torch.inference_mode()
def generate_replies(
    model,
    draw: TokenSampler,
    max_new_tokens: int,
    asked: list[tuple[Ids, random.Random]],
    alone: bool = False,
) -> list[Sampled]:
    """Samples a reply to each conversation, by `generate` of transformers.

    Args:
        model: A causal LM.
        draw: What draws a token.
        max_new_tokens: Of a reply at most.
        asked: Of each conversation the ids so far, and its own random numbers.
        alone: One conversation at a time, not all side by side.

    Returns:
        Of each reply its ids, and the log-probability of each as the sampler had it, in nats; none
        at temperature 0.
    """
    at_once = 1 if alone else len(asked)
    end = draw.encoder.end_of_turn
    options = dict(do_sample=False, use_cache=True, max_new_tokens=max_new_tokens,
                   eos_token_id=end, pad_token_id=end)
    if max(len(ids) for ids, _ in asked) > PREFILL_CHUNK:
        options["prefill_chunk_size"] = PREFILL_CHUNK
    found = []
    for first in range(0, len(asked), at_once):
        some = asked[first:first + at_once]
        # Padded on the left, all begin to write in the same column.
        texts = [torch.tensor(ids) for ids, _ in some]
        ids = pad_sequence(texts, batch_first=True, padding_side="left")           # (B, L)
        read = [torch.ones_like(text) for text in texts]
        mask = pad_sequence(read, batch_first=True, padding_side="left")           # (B, L)
        written = [Reply(rng) for _, rng in some]
        model.generate(ids.to(model.device), attention_mask=mask.to(model.device),
                       logits_processor=[SampledTokenProcessor(draw, written)], **options)
        found += [(reply.ids, reply.log_probs) for reply in written]
    return found


class SampledTokenProcessor(transformers.LogitsProcessor):
    """Leaves `generate` no other token than the one that was drawn."""

    def __init__(self, draw: TokenSampler, written: list[Reply]):
        self.draw = draw
        self.written = written

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        drawn = self.draw(self.written, logits)                                   # (B, 1)
        return torch.full_like(logits, -torch.inf).scatter_(1, drawn, 0.0)
