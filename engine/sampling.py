"""Sampling: the distribution of an agent's tokens, one sampled token, and replies from `generate`.

`engine.kv_cache` samples with the same `TokenSampler` and is faster. `generate_replies` supports
the models that `engine.kv_cache` does not.

Shapes: B replies are sampled together, and V is the vocabulary size. Log-probabilities are in nats.
"""

import math
import random
from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dpo import Ids, in_fp32

Sampled = tuple[Ids, list[float]]  # a reply: its token ids, and the log-probability of each


class Sampler:
    """The sampling distribution of an agent: softmax(logits / temperature) without suppressed ids.

    With the default arguments, it is the model's distribution over its whole vocabulary.

    GRPO also trains on this distribution. If its log-probabilities included suppressed tokens, the
    probability of these would grow with each step that makes sampled tokens less probable, and
    nothing would reduce it again.

    Args:
        temperature: The temperature. If it is 0, sampling is greedy.
        suppressed_ids: The ids that are never sampled.
        vocabulary_size: The vocabulary size, by default that of the logits. A model may have more
            logits than this. The additional ids are suppressed, too, unless `suppressed_ids` is
            empty.
    """

    def __init__(self, temperature: float = 1.0, suppressed_ids: tuple[int, ...] = (),
                 vocabulary_size: int | None = None):
        self.temperature = temperature
        self.suppressed_ids = suppressed_ids
        self.vocabulary_size = vocabulary_size
        # A cache, (device, V) -> tensor of all suppressed ids, since each copy of such a tensor to
        # a GPU is a host-device synchronisation.
        self.index = {}

    def process_logits(self, logits: Tensor) -> Tensor:
        """Returns processed logits in fp32, (..., V). Their softmax is the sampling distribution.

        Like a logits processor of transformers, it applies the temperature, and sets the logits of
        suppressed ids to -inf.

        Args:
            logits: The logits of a model, (..., V).
        """
        logits = in_fp32(logits)
        if self.temperature not in (0, 1):
            logits = logits / self.temperature
        if not self.suppressed_ids:
            return logits
        key = logits.device, logits.shape[-1]
        if key not in self.index:
            beyond = range(self.vocabulary_size or key[1], key[1])
            # The first call may run in inference mode, whose tensors cannot be used in training.
            with torch.inference_mode(False):
                self.index[key] = torch.tensor([*self.suppressed_ids, *beyond],
                                               device=logits.device)
        return logits.index_fill(-1, self.index[key], -torch.inf)


@dataclass
class Reply:
    """A reply that is being sampled."""
    rng: random.Random  # the episode's own generator, so other episodes do not change its numbers
    ids: Ids = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # one for each id; empty if greedy
    done: bool = False


class TokenSampler:
    """Samples the next token of several replies.

    Args:
        sampler: The distribution.
        encoder: An `engine.chat.Encoder`.
        stops: The stop strings, which end a reply, as the end-of-turn token does.
    """

    def __init__(self, sampler: Sampler, encoder, stops: tuple[str, ...]):
        self.sampler = sampler
        self.encoder = encoder
        self.stops = stops
        self.may_end = {}  # token id -> True if a stop string may end within this token

    def __call__(self, replies: list[Reply], logits: Tensor) -> Tensor:
        """Appends a token to each unfinished reply, with a single host-device synchronisation.

        Args:
            replies: The B replies.
            logits: The logits of the next token of each reply, (B, V).

        Returns:
            The token ids, (B, 1). A finished reply gets the end-of-turn token.
        """
        log_p = self.sampler.process_logits(logits).log_softmax(-1)               # (B, V)
        u = self.uniform(replies).to(log_p.device, non_blocking=True)             # (B, 1)
        if self.sampler.temperature > 0:
            # Inverse transform sampling: choose the first token at which the cumulative
            # distribution function exceeds u. Because of rounding, its last value is not exactly 1.
            cdf = log_p.exp().double().cumsum(-1)                                 # (B, V)
            tokens = (cdf <= cdf[:, -1:] * u).sum(-1, keepdim=True)               # (B, 1)
        else:
            tokens = log_p.argmax(-1, keepdim=True)                               # (B, 1)
        values = log_p.gather(1, tokens)                                          # (B, 1)
        tokens = tokens.masked_fill(u < 0, self.encoder.end_of_turn)
        rows = torch.cat([tokens.double(), values.double()], 1).tolist()          # (B, 2)
        for reply, (token, value) in zip(replies, rows):
            if not reply.done:
                self.add(reply, int(token), value)
        return tokens

    def uniform(self, replies: list[Reply]) -> Tensor:
        """Draws a random number in [0, 1) for each reply, (B, 1).

        A finished reply gets -1, and its generator stays unchanged. Otherwise the later turns of
        its episode would depend on the length of the other replies. At temperature 0, no number is
        drawn.
        """
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
        """Appends a token to a reply, and marks the reply as done if the token ends it."""
        if not math.isfinite(log_prob):
            raise FloatingPointError("the model's logits are not finite")
        reply.ids.append(token)
        if self.sampler.temperature > 0:
            reply.log_probs.append(log_prob)
        reply.done = token == self.encoder.end_of_turn or self.stops_at(reply.ids)

    def stops_at(self, ids: Ids) -> bool:
        """Returns True if a stop string ends within the last of these tokens.

        Few tokens contain the last character of a stop string, so the text is decoded rarely.
        """
        last = ids[-1]
        if last not in self.may_end:
            text = self.encoder.decode([last])  # a part of a character is decoded as U+FFFD
            self.may_end[last] = any(s[-1] in text or "\N{REPLACEMENT CHARACTER}" in text
                                     for s in self.stops)
        if not self.may_end[last]:
            return False
        # Each token of a stop string has at least one character, so this many tokens contain it.
        return any(stop in self.encoder.decode(ids[-len(stop) - 1:]) for stop in self.stops)


# ------------------------------------------------------------------------ replies by `generate`

# The number of tokens of a sequence that are prefilled at a time. Without chunks, the memory of
# the attention mask would grow with the square of the length.
PREFILL_CHUNK = 1024


@torch.inference_mode()
def generate_replies(
    model,
    token_sampler: TokenSampler,
    max_new_tokens: int,
    conversations: list[tuple[Ids, random.Random]],
    single: bool = False,
) -> list[Sampled]:
    """Samples a reply to each conversation with `generate` of transformers.

    Args:
        model: A causal language model.
        token_sampler: The function that samples a token.
        max_new_tokens: The maximum number of tokens in a reply.
        conversations: The token ids of each conversation, and its random number generator.
        single: If true, conversations run at batch size 1. Otherwise they form one batch.

    Returns:
        The token ids of each reply, and the log-probability of each token under the sampler, in
        nats. At temperature 0 there are no log-probabilities.
    """
    batch_size = 1 if single else len(conversations)
    end = token_sampler.encoder.end_of_turn
    options = dict(do_sample=False, use_cache=True, max_new_tokens=max_new_tokens,
                   eos_token_id=end, pad_token_id=end)
    if max(len(ids) for ids, _ in conversations) > PREFILL_CHUNK:
        options["prefill_chunk_size"] = PREFILL_CHUNK
    sampled = []
    for first in range(0, len(conversations), batch_size):
        batch = conversations[first:first + batch_size]
        # With padding on the left, all replies start in the same column.
        sequences = [torch.tensor(ids) for ids, _ in batch]
        ids = pad_sequence(sequences, batch_first=True, padding_side="left")      # (B, L)
        ones = [torch.ones_like(sequence) for sequence in sequences]
        mask = pad_sequence(ones, batch_first=True, padding_side="left")          # (B, L)
        replies = [Reply(rng) for _, rng in batch]
        model.generate(ids.to(model.device), attention_mask=mask.to(model.device),
                       logits_processor=[SampledTokenProcessor(token_sampler, replies)], **options)
        sampled += [(reply.ids, reply.log_probs) for reply in replies]
    return sampled


class SampledTokenProcessor(transformers.LogitsProcessor):
    """A logits processor that lets `generate` choose only the token that TokenSampler sampled.

    It sets the logits of all other tokens to -inf.
    """

    def __init__(self, token_sampler: TokenSampler, replies: list[Reply]):
        self.token_sampler = token_sampler
        self.replies = replies

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        tokens = self.token_sampler(self.replies, logits)                         # (B, 1)
        return torch.full_like(logits, -torch.inf).scatter_(1, tokens, 0.0)
