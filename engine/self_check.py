"""Numerical self-check: selects the fastest backends that compute correct log-probabilities.

A backend is one of several implementations of generation or of forward passes, such as "kv_cache".
Not every model works with every backend.
"""

import random
from collections.abc import Callable

import torch

from common.settings import UsageError
from dpo import Ids, Trajectory, token_log_probs
from engine import models, prefix_sharing
from engine.chat import Encoder, first_line
from engine.generation import REPLY_BACKENDS, make_generator
from engine.sampling import Sampler, TokenSampler

# Maximum allowed error of a backend, in nats per token. In fp32, rounding causes errors of 4e-5,
# and bugs cause errors of 0.012 or more.
TOLERANCE = 1e-3
SHORT_TOKENS = 24  # maximum number of tokens in the short test sequence
REPLY_TOKENS = 6   # number of tokens in a test reply
# The backends for forward passes: "prefix_sharing" (see `engine.prefix_sharing`), and "padded",
# which uses padded batches. If a model supports neither, its forward passes use batch size 1.
PASS_BACKENDS = ("prefix_sharing", "padded")
# The errors that a model raises if it does not support a backend.
MODEL_ERRORS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError,
                RuntimeError, TypeError, ValueError)
# Errors of the GPU: it is out of memory, or its driver fails. They are subclasses of RuntimeError,
# so they have to be caught before MODEL_ERRORS.
MACHINE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)


@torch.inference_mode()
def select_backends(model, encoder: Encoder, longest: int = 64) -> dict:
    """Tests all backends with a model, and selects those that compute correct log-probabilities.

    The reference is a plain forward pass at batch size 1, without padding and without a KV cache. A
    backend is correct if its log-probabilities differ from the reference by less than TOLERANCE.
    Typical bugs are models that attend to padding tokens, and models that compute wrong results
    with a KV cache or for long sequences.

    The check runs in fp32. In bf16, rounding changes the log-probability of a token by 0.04 to
    0.06 nats, which is more than some bugs do.

    Args:
        model: A causal language model. Its weights stay in fp32 after the check. Its attention
            implementation is restored.
        longest: The maximum number of tokens in a test sequence, replies included. Long sequences
            are needed because some bugs occur only beyond a certain length.

    Returns:
        A dict with two entries. `replies` is the fastest correct backend for generation, one of
        REPLY_BACKENDS. `passes` is a list of all correct backends for forward passes, a subset
        of PASS_BACKENDS.

    Raises:
        UsageError: No backend for generation is correct.
    """
    model.float()
    attention = model.config._attn_implementation
    sequences = random_sequences(encoder, longest)
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
    """Returns the numerical error of a backend, in nats per token, and an empty string.

    If check() raises one of MODEL_ERRORS, the error is infinity, and the string is the message of
    the exception.
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
    """Creates three or four test sequences of random tokens.

    1. A long sequence of almost `longest` tokens.
    2. Another long sequence. Its first third is identical to that of sequence 1.
    3. A short sequence of at most SHORT_TOKENS tokens.
    4. A sequence of `longest` / 3 tokens, unless sequence 3 already has this length. Some bugs
       occur only at medium lengths.

    No other lengths are tested, because some models (LongRoPE) change their position embeddings
    beyond a certain length. If a test sequence crossed that length during generation, even a
    correct backend could have a large error.
    """
    rng = random.Random(0)
    ids = sorted(encoder.valid_ids - set(suppressed_ids(encoder)))
    long = rng.choices(ids, k=max(SHORT_TOKENS, longest - 4 * REPLY_TOKENS))
    twin = long[:len(long) // 3] + rng.choices(ids, k=len(long) - len(long) // 3)
    third = longest // 3
    sequences = [long, twin, rng.choices(ids, k=min(SHORT_TOKENS, third))]
    if third > SHORT_TOKENS:
        sequences.append(rng.choices(ids, k=third))
    return sequences


def suppressed_ids(encoder: Encoder) -> tuple[int, ...]:
    """Returns the suppressed ids and the end-of-turn token, so that all test replies are long."""
    return (*encoder.sampler().suppressed_ids, encoder.end_of_turn)


def reply_error(model, encoder: Encoder, sequences: list[Ids], longest: int, backend: str) -> float:
    """Returns the numerical error of a generation backend.

    The backend generates two replies to each test sequence, with random tokens between them as an
    observation. Its log-probabilities are compared with those of a plain forward pass.

    Returns:
        The mean absolute error per token, in nats, for the sequence with the largest error.
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
    errors = []
    for t, _ in requests:
        plain = token_log_probs(model, [t], sampler.process_logits)               # (A,)
        errors.append((plain - plain.new_tensor(t.log_probs)).abs().mean())
    return torch.stack(errors).max().item()  # NaN if one of them is NaN


def pass_error(model, sequences: list[Ids], passes: str) -> float:
    """Returns the numerical error of a backend for forward passes, defined as in `reply_error`.

    The backend computes the log-probabilities of all test sequences in a single forward pass. They
    are compared with those of a plain forward pass for each sequence.
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
        errors.append((values - expected).abs().mean())
    return torch.stack(errors).max().item()
