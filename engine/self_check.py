"""Numerical self-check: selects the fastest backends that compute correct log-probabilities.

A new run checks every model that it trains or runs episodes with, and stores the selected backends
in its config.json.
"""

import random
from collections.abc import Callable

import torch

from common.settings import UsageError
from dpo import Ids, Trajectory, token_log_probs
from engine import models, prefix_sharing
from engine.chat import Encoder, first_line
from engine.kv_cache import CachedGenerator
from engine.sampling import Sampler, TokenSampler, generate_replies

# The tolerated error in nats per token. Rounding in fp32 causes 4e-5, and bugs cause 0.012 or more.
TOLERANCE = 1e-3
SHORT_TOKENS = 24  # number of tokens in the shortest test sequence
REPLY_TOKENS = 6   # number of tokens in a test reply
# The backends for generation, the fastest first: "kv_cache" keeps its KV cache across turns (see
# `engine.kv_cache`). The others call `generate` of transformers with a new cache in each turn,
# "batched" for all episodes at once, "single" at batch size 1.
REPLY_BACKENDS = ("kv_cache", "batched", "single")
# The backends for log-probabilities: "prefix_sharing" (see `engine.prefix_sharing`), and "padded"
# batches. A model that supports neither of them runs at batch size 1.
PASS_BACKENDS = ("prefix_sharing", "padded")
# A model's code raises one of these errors if it does not support a backend. Problems with the disk
# or the driver raise other errors.
MODEL_ERRORS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError,
                RuntimeError, TypeError, ValueError)
# These are RuntimeErrors, too, so they have to be caught first.
MACHINE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)


@torch.inference_mode()
def select_backends(model, encoder: Encoder, longest: int = 64) -> dict:
    """Selects the fastest backends that agree with plain forward passes at batch size 1.

    A backend agrees if it computes the same log-probabilities. Some models attend to padding, and
    some compute wrong results with their cache or beyond a certain length.

    The check looks for bugs, not for rounding errors. In bf16, rounding alone changes a token's
    log-probability by 0.04 to 0.06 nats, more than some bugs do, so the model is cast to fp32.

    Args:
        model: A causal language model. Its weights stay in fp32 after the check, and its attention
            implementation is restored.
        encoder: The encoder of its tokenizer.
        longest: The maximum number of tokens in a test sequence, replies included. Some bugs appear
            only beyond a certain length.

    Returns:
        A dict with two entries: `replies` is the first correct backend in REPLY_BACKENDS, and
        `passes` is the list of all correct ones in PASS_BACKENDS.

    Raises:
        UsageError: No backend for generation is correct. Errors of the machine, such as running out
            of memory, are raised unchanged.
    """
    model.float()
    attention = model.config._attn_implementation
    sequences = random_sequences(encoder, longest)
    reason = ""
    for backend in REPLY_BACKENDS:
        error, reason = backend_error(
            lambda: reply_error(model, encoder, sequences, longest, backend))
        model.set_attn_implementation(attention)
        if error < TOLERANCE:
            break
    else:
        remedy = "use another model"
        positions = models.positions_of(model.config)
        if longest > positions:
            remedy = f"it has {positions:,} positions, lower --max-tokens {longest}"
        reason = reason or "the log-probabilities of its replies differ from its forward pass"
        raise UsageError(f"--model {model.name_or_path}: {type(model).__name__} cannot be used: "
                         f"{reason}; {remedy}")

    correct = []
    for passes in PASS_BACKENDS:
        error, _ = backend_error(lambda: pass_error(model, sequences, passes))
        model.set_attn_implementation(attention)
        if error < TOLERANCE:
            correct.append(passes)
    return dict(replies=backend, passes=correct)


def backend_error(check: Callable) -> tuple[float, str]:
    """Returns the error of a backend in nats per token, and a message if the backend fails.

    Args:
        check: A function without arguments that runs the backend and returns its error. If it
            raises one of MODEL_ERRORS, the backend fails, and its error is infinite.
    """
    try:
        return check(), ""
    except MACHINE_ERRORS:
        raise
    except MODEL_ERRORS as error:
        if "DefaultCPUAllocator" in str(error):  # out of memory on a CPU
            raise MemoryError(str(error)) from None
        return float("inf"), first_line(error)


def random_sequences(encoder: Encoder, longest: int) -> list[Ids]:
    """Draws the test sequences: up to four sequences of random tokens.

    They are a long one, a second long one with the same first third, a short one, and one with a
    third of the maximum length, since some bugs appear neither in long nor in short sequences. No
    sequence is longer than this third and shorter than the long ones. Some models switch their
    behaviour at a certain length, and no sequence may grow past that length during the check.
    """
    rng = random.Random(0)
    ids = sorted(encoder.valid_ids - set(suppressed_ids(encoder)))
    long = rng.choices(ids, k=max(SHORT_TOKENS, longest - 4 * REPLY_TOKENS))
    twin = long[:len(long) // 3] + rng.choices(ids, k=len(long) - len(long) // 3)
    sequences = [long, twin, rng.choices(ids, k=min(SHORT_TOKENS, longest // 3))]
    third = longest // 3
    return [*sequences, rng.choices(ids, k=third)] if third > SHORT_TOKENS else sequences


def suppressed_ids(encoder: Encoder) -> tuple[int, ...]:
    """Returns the ids that are never sampled during the check, so that no reply ends early."""
    return (*encoder.sampler().suppressed_ids, encoder.end_of_turn)


def reply_error(model, encoder: Encoder, sequences: list[Ids], longest: int, backend: str) -> float:
    """Generates replies to the sequences in two turns, and measures the error of a backend.

    Args:
        model, encoder, longest: The same as in `select_backends`.
        sequences: The sequences from `random_sequences`.
        backend: The name of the backend, one of REPLY_BACKENDS.

    Returns:
        The largest error of a sequence, in nats per token.
    """
    sampler = Sampler(suppressed_ids=suppressed_ids(encoder))
    generate = make_generator(backend, model, TokenSampler(sampler, encoder, ()), len(sequences),
                              longest, REPLY_TOKENS, longest)
    rng = random.Random(1)
    requests = []
    for n, ids in enumerate(sequences):
        requests.append((Trajectory(ids=list(ids), action_mask=[0] * len(ids)), random.Random(n)))
    for _ in range(2):
        for (t, _), (ids, log_probs) in zip(requests, generate(requests)):
            t.extend(ids, is_action=True)
            t.log_probs += log_probs
            t.extend(rng.choices(sequences[0], k=REPLY_TOKENS), is_action=False)
    worst = 0.0
    for t, _ in requests:
        plain = token_log_probs(model, [t], sampler.process_logits)               # (A,)
        worst = max(worst, (plain - plain.new_tensor(t.log_probs)).abs().mean().item())
    return worst


def make_generator(backend: str, model, token_sampler: TokenSampler, slots: int, max_tokens: int,
                   max_new_tokens: int, tokens: int) -> Callable:
    """Returns a function that generates replies with `backend`, one of REPLY_BACKENDS.

    The other arguments are those of `engine.kv_cache.CachedGenerator`, and the function is called
    in the same way: generate([(trajectory, rng)]) returns [(ids, log_probs)].
    """
    if backend == "kv_cache":
        return CachedGenerator(model, token_sampler, slots, max_tokens, max_new_tokens, tokens)

    def generate(requests):
        conversations = [(t.ids, rng) for t, rng in requests]
        return generate_replies(model, token_sampler, max_new_tokens, conversations,
                                single=backend == "single")

    return generate


def pass_error(model, sequences: list[Ids], passes: str) -> float:
    """Runs all sequences in one forward pass, and measures the error of a backend.

    Args:
        model: The model.
        sequences: The sequences from `random_sequences`.
        passes: The name of the backend, one of PASS_BACKENDS.

    Returns:
        The largest error of a sequence, in nats per token.
    """
    trajectories = []
    for ids in sequences:
        mask = [int(k % 8 == 0 or k > len(ids) - REPLY_TOKENS) for k in range(len(ids))]
        trajectories.append(Trajectory(ids=ids, action_mask=mask))
    plain = [token_log_probs(model, [t]) for t in trajectories]                   # (a,) each
    if passes == "prefix_sharing":
        model.set_attn_implementation("prefix_sharing")
        batched = prefix_sharing.log_probs(model, trajectories, sum(map(len, sequences)))  # (A,)
    else:
        batched = token_log_probs(model, trajectories)                            # (A,)
    errors = []
    for values, expected in zip(batched.split([len(values) for values in plain]), plain):
        errors.append((values - expected).abs().mean().item())
    return max(errors)
