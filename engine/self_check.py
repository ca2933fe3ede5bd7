"""A trial: how a model has to be asked, so that its log-probabilities are right.

A new run tries each model that plays or trains, and keeps the verdict in its config.json.
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

TOLERANCE = 1e-3  # nats a token that rounding explains in fp32: it makes 4e-5, faults 0.012 and more
SHORT_TOKENS = 24    # tokens of the shortest text
REPLY_TOKENS = 6       # tokens of a reply
# Ways of replying, the fastest first: rows of a cache that is kept over turns; else `generate`,
# side by side with a cache of one turn, or one at a time.
REPLY_BACKENDS = ("kv_cache", "batched", "single")
# Ways of passes: with beginnings that are shared, or rows that are padded; else one at a time.
PASS_BACKENDS = ("prefix_sharing", "padded")
# What a model's code raises where it lacks a way of being run. Disk and driver are not among them.
MODEL_ERRORS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError,
           TypeError, ValueError)
MACHINE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)  # which are RuntimeErrors, too


@torch.inference_mode()
def select_backends(model, encoder: Encoder, longest: int = 64) -> dict:
    """Finds the ways to ask a model that give right log-probabilities: those of plain passes over
    one text. Some models read padding, or err with their cache, or by a text's length.

    It judges code, not rounding: in bf16 rounding alone moves a token by 0.04 to 0.06 nats, more
    than some faults do. So the model is turned into fp32.

    Args:
        model: A causal LM; its weights are fp32 afterwards, its attention its own.
        encoder: Of its tokenizer.
        longest: Tokens of the longest text that is tried, since some faults begin at a length.

    Returns:
        The fastest of REPLY_BACKENDS that is right, as `replies`; and those of PASS_BACKENDS that are.

    Raises:
        Refused: No way is right. What the machine lacks, memory say, is raised as it is.
    """
    model.float()
    attention = model.config._attn_implementation
    texts = random_sequences(encoder, longest)
    why = ""
    for way in REPLY_BACKENDS:
        error, why = backend_error(lambda: reply_error(model, encoder, texts, longest, way))
        model.set_attn_implementation(attention)
        if error < TOLERANCE:
            break
    else:
        remedy = "use another model"
        positions = models.positions_of(model.config)
        if longest > positions:
            remedy = f"it has {positions:,} positions, lower --max-tokens {longest}"
        why = why or "its replies have other log-probabilities than plain passes over them"
        raise UsageError(f"--model {model.name_or_path}: {type(model).__name__} cannot be used: "
                      f"{why}; {remedy}")

    right = []
    for passes in PASS_BACKENDS:
        error, _ = backend_error(lambda: pass_error(model, texts, passes))
        model.set_attn_implementation(attention)
        if error < TOLERANCE:
            right.append(passes)
    return dict(replies=way, passes=right)


def backend_error(tried: Callable) -> tuple[float, str]:
    """How far a way is off, and why it cannot be taken at all, if it cannot."""
    try:
        return tried(), ""
    except MACHINE_ERRORS:
        raise
    except MODEL_ERRORS as error:
        if "DefaultCPUAllocator" in str(error):  # out of memory, on a CPU
            raise MemoryError(str(error)) from None
        return float("inf"), first_line(error)


def random_sequences(encoder: Encoder, longest: int) -> list[Ids]:
    """Returns random texts: a long one, its beginning with another end, a short one, and one of a
    third of the length, since some models err at neither end. None is longer than a third and
    shorter than the long ones: some models read all of a text otherwise from a length on, and none
    is to grow past it."""
    rng = random.Random(0)
    drawn = sorted(encoder.valid_ids - set(suppressed_ids_of(encoder)))
    long = rng.choices(drawn, k=max(SHORT_TOKENS, longest - 4 * REPLY_TOKENS))
    twin = long[:len(long) // 3] + rng.choices(drawn, k=len(long) - len(long) // 3)
    texts = [long, twin, rng.choices(drawn, k=min(SHORT_TOKENS, longest // 3))]
    return [*texts, rng.choices(drawn, k=longest // 3)] if longest // 3 > SHORT_TOKENS else texts


def suppressed_ids_of(encoder: Encoder) -> tuple[int, ...]:
    """What a reply of a trial never has, so that none ends early."""
    return (*encoder.sampler().suppressed_ids, encoder.end_of_turn)


def reply_error(model, encoder: Encoder, texts: list[Ids], longest: int, way: str) -> float:
    """How far replies to the texts, in two turns, are off plain passes, in nats a token."""
    sampler = Sampler(suppressed_ids=suppressed_ids_of(encoder))
    answer = make_generator(way, model, TokenSampler(sampler, encoder, ()), len(texts), longest, REPLY_TOKENS, longest)
    rng = random.Random(1)
    asked = []
    for n, ids in enumerate(texts):
        asked.append((Trajectory(ids=list(ids), action_mask=[0] * len(ids)), random.Random(n)))
    for _ in range(2):
        for (t, _), (ids, log_probs) in zip(asked, answer(asked)):
            t.extend(ids, is_action=True)
            t.log_probs += log_probs
            t.extend(rng.choices(texts[0], k=REPLY_TOKENS), is_action=False)
    worst = 0.0
    for t, _ in asked:
        plain = token_log_probs(model, [t], sampler.process_logits)                       # (A,)
        worst = max(worst, (plain - plain.new_tensor(t.log_probs)).abs().mean().item())
    return worst


def make_generator(way: str, model, draw: TokenSampler, slots: int, max_tokens: int, max_new_tokens: int,
              tokens: int) -> Callable:
    """What replies to conversations in one of the REPLY_BACKENDS, see `engine.kv_cache.CachedGenerator`."""
    if way == "kv_cache":
        return CachedGenerator(model, draw, slots, max_tokens, max_new_tokens, tokens)

    def reply(asked):
        conversations = [(t.ids, rng) for t, rng in asked]
        return generate_replies(model, draw, max_new_tokens, conversations, alone=way == "single")

    return reply


def pass_error(model, texts: list[Ids], passes: str) -> float:
    """How far a pass over all texts is off plain passes over each, in nats a token."""
    trajectories = []
    for ids in texts:
        mask = [int(k % 8 == 0 or k > len(ids) - REPLY_TOKENS) for k in range(len(ids))]
        trajectories.append(Trajectory(ids=ids, action_mask=mask))
    plain = [token_log_probs(model, [t]) for t in trajectories]                   # (a,) each
    if passes == "prefix_sharing":
        model.set_attn_implementation("prefix_sharing")
        found = prefix_sharing.log_probs(model, trajectories, sum(map(len, texts)))       # (A,)
    else:
        found = token_log_probs(model, trajectories)                              # (A,)
    errors = []
    for own, text in zip(found.split([len(values) for values in plain]), plain):
        errors.append((own - text).abs().mean().item())
    return max(errors)
