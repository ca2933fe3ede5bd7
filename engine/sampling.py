"""Samples tokens from processed logits, and generates replies with `generate` of transformers.

`generate` works for all models. `engine.kv_cache` is faster, but does not support all models. Both
use `TokenSampler`.

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

Sampled = tuple[Ids, list[float]]  # the token ids of a reply, and the log-probability of each token


class Sampler:
    """The distribution that an agent's tokens are sampled from.

    The distribution is softmax(logits / temperature), and the logits of suppressed tokens are -inf.
    With the default arguments, it is the model's own distribution over its whole vocabulary.

    The GRPO loss also uses this distribution. With the model's own distribution, a negative
    advantage would decrease the probability of the sampled tokens, and thereby increase that of
    suppressed tokens. Suppressed tokens are never sampled, so no advantage can correct this.

    Args:
        temperature: The sampling temperature. If it is 0, decoding is greedy.
        suppressed_ids: The token ids that are never sampled, such as special tokens.
        vocabulary_size: The number of token ids in use. If the model has more logits, the extra ids
            are also suppressed, unless `suppressed_ids` is empty. By default, all logits are used.
    """

    def __init__(self, temperature: float = 1.0, suppressed_ids: tuple[int, ...] = (),
                 vocabulary_size: int | None = None):
        self.temperature = temperature
        self.suppressed_ids = suppressed_ids
        self.vocabulary_size = vocabulary_size
        # Cached tensors of all suppressed ids, with (device, V) as the key. Without this cache,
        # each sampling step copies the ids to the GPU again, which causes a host-device
        # synchronisation.
        self.index = {}

    def process_logits(self, logits: Tensor) -> Tensor:
        """Returns processed logits, (..., V) fp32: their softmax is the sampling distribution."""
        logits = in_fp32(logits)
        if self.temperature not in (0, 1):
            logits = logits / self.temperature
        if not self.suppressed_ids:
            return logits
        key = logits.device, logits.shape[-1]
        if key not in self.index:
            beyond = range(self.vocabulary_size or key[1], key[1])
            # Tensors that are created in inference mode cannot be used in training later.
            with torch.inference_mode(False):
                self.index[key] = torch.tensor([*self.suppressed_ids, *beyond],
                                               device=logits.device)
        return logits.index_fill(-1, self.index[key], -torch.inf)


@dataclass
class Reply:
    """A reply that is being sampled."""
    # The random number generator of the episode. Its random numbers do not depend on the other
    # episodes in the batch.
    rng: random.Random
    ids: Ids = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # one per id; empty at temperature 0
    done: bool = False


class TokenSampler:
    """Samples the next token for each reply in a batch.

    A reply ends after a string in `stops`, or after an end-of-turn token.
    """

    def __init__(self, sampler: Sampler, encoder, stops: tuple[str, ...]):
        self.sampler = sampler
        self.encoder = encoder
        self.stops = stops
        self.may_end = {}  # {token id: True if a stop string may end within the token}

    def __call__(self, replies: list[Reply], logits: Tensor) -> Tensor:
        """Samples a token for each reply, and appends it to the reply unless the reply is finished.

        Each call causes only one host-device synchronisation for the whole batch.

        Args:
            logits: The logits of the next token of each reply, (B, V).

        Returns:
            The token ids, (B, 1). Finished replies get the end-of-turn token.
        """
        log_p = self.sampler.process_logits(logits).log_softmax(-1)               # (B, V)
        u = self.uniform(replies).to(log_p.device, non_blocking=True)             # (B, 1)
        if self.sampler.temperature > 0:
            # Inverse transform sampling: choose the first token at which the cumulative
            # distribution function (CDF) exceeds u. Rounding may make the last value of the CDF
            # differ from 1, so u is multiplied by this value.
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
        """Draws a uniform random number in [0, 1) for each reply, (B, 1).

        The value is -1 for a finished reply. If a number were drawn for it, the later turns of its
        episode would depend on the lengths of the other replies in the batch. At temperature 0, the
        value for unfinished replies is 0.
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
        if not math.isfinite(log_prob):
            raise FloatingPointError("the model's logits are not finite")
        reply.ids.append(token)
        if self.sampler.temperature > 0:
            reply.log_probs.append(log_prob)
        reply.done = token == self.encoder.end_of_turn or self.stops_at(reply.ids)

    def stops_at(self, ids: Ids) -> bool:
        """Returns True if the last token of a reply completes a stop string.

        For speed, the reply is decoded only if the last token contains the last character of a stop
        string. Few tokens do.
        """
        last = ids[-1]
        if last not in self.may_end:
            # A token with only some bytes of a character might complete any stop string. Such a
            # token is decoded as U+FFFD (REPLACEMENT CHARACTER).
            text = self.encoder.decode([last])
            self.may_end[last] = any(s[-1] in text or "\N{REPLACEMENT CHARACTER}" in text
                                     for s in self.stops)
        if not self.may_end[last]:
            return False
        # A stop string of n ASCII characters has at most n tokens. One more token is decoded as
        # context, because some tokenizers remove a space at the start of a decoded text.
        return any(stop in self.encoder.decode(ids[-len(stop) - 1:]) for stop in self.stops)


# ------------------------------------------------------------------------ replies by `generate`

# Long sequences are prefilled in chunks of this many tokens. Without chunks, the memory of the
# attention mask grows with the square of the sequence length.
PREFILL_CHUNK = 1024


@torch.inference_mode()
def generate_replies(
    model,
    token_sampler: TokenSampler,
    max_new_tokens: int,
    conversations: list[tuple[Ids, random.Random]],
    single: bool = False,
) -> list[Sampled]:
    """Generates a reply to each conversation with the `generate` method of transformers.

    Args:
        max_new_tokens: The maximum number of tokens in a reply.
        conversations: A list of pairs: the token ids of a conversation, and the random number
            generator of its episode.
        single: If true, the batch size is 1. Otherwise all conversations form one batch.

    Returns:
        A pair for each conversation: the token ids of the reply, and the list of their
        log-probabilities under the sampling distribution, in nats. The list is empty at temperature
        0.
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
        # Pad on the left, so that the replies of all conversations start at the same index.
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
    """A logits processor that makes `generate` output the tokens sampled by a `TokenSampler`.

    It sets the logit of the sampled token to 0, and all other logits to -inf, so that greedy
    decoding chooses the sampled token.
    """

    def __init__(self, token_sampler: TokenSampler, replies: list[Reply]):
        self.token_sampler = token_sampler
        self.replies = replies

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        tokens = self.token_sampler(self.replies, logits)                         # (B, 1)
        return torch.full_like(logits, -torch.inf).scatter_(1, tokens, 0.0)
