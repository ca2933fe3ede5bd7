"""Backends that generate the replies of agents."""

from collections.abc import Callable

from engine.kv_cache import CachedGenerator
from engine.sampling import TokenSampler, generate_replies

# The backends for generation, from fastest to slowest. "kv_cache" keeps its KV cache across turns.
# "batched" and "single" (batch size 1) call the `generate` method of transformers, which creates a
# new KV cache in each turn. `engine.self_check` selects the backend of a model.
REPLY_BACKENDS = ("kv_cache", "batched", "single")


def make_generator(
    backend: str,
    model,
    token_sampler: TokenSampler,
    slots: int,
    max_tokens: int,
    max_new_tokens: int,
    tokens: int,
) -> Callable:
    """Returns a function that generates the next reply in each of several episodes.

    The function is called as generate([(trajectory, rng)]), where rng is the random number
    generator of the episode. It returns one tuple (ids, log_probs) for each reply.

    The arguments are those of `engine.kv_cache.CachedGenerator`. Other backends ignore `slots`,
    `max_tokens` and `tokens`.
    """
    if backend == "kv_cache":
        return CachedGenerator(model, token_sampler, slots, max_tokens, max_new_tokens, tokens)

    def generate(requests):
        conversations = [(t.ids, rng) for t, rng in requests]
        return generate_replies(model, token_sampler, max_new_tokens, conversations,
                                single=backend == "single")

    return generate
