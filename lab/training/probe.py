"""Whether a model computes what `engine/` takes for granted.

Packing and the cache are right where tokens meet in softmax attention over all earlier ones alone,
once a layer, at the positions given. Each check raises ValueError, which names what is in the way:
first what the config says, then the calls of the layers, which need no weights; what neither shows
is found by comparing passes.
"""

import random
from contextlib import contextmanager, suppress
from inspect import signature
from pathlib import Path
from traceback import extract_tb

import torch
from transformers import AutoModelForCausalLM

from lab import tokens as dpo
from lab.engine import sharding
from lab.engine.cache import SlotCache, cache_shape, next_token_logits

KNOWN = {"attention", "full_attention", "sliding_attention", "chunked_attention", "mlp", "moe"}
OTHER = "use a model with full attention in all layers, such as Llama, Qwen2 or Qwen3"
# The largest error of a log-probability, in parts of the largest logit. With random weights from
# 1e-4 to 3, right ones of 189 families have up to 3e-4, half of them 3e-6, wrong ones from 2e-3 on.
TOLERANCE = 1e-3
DOUBLINGS = 16  # at most, of weights that are too small for an error to show
FAULTS = (ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError, RuntimeError)


def check_config(config, max_tokens: int) -> None:
    """Refuses what the config alone shows to be wrong for episodes of max_tokens tokens."""
    name = config.architectures[0]
    try:
        text = config.get_text_config()
    except ValueError:  # it has several
        text = None
    if text is not config:
        raise ValueError(f"{name} reads more than text; use a model of text alone")
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    if other := sorted(set(kinds) - KNOWN):
        raise ValueError(f"{name} has layers of type {', '.join(other)}, in which tokens meet "
                         f"otherwise than in attention over all earlier ones; {OTHER}")
    try:
        cache_shape(config)
    except (AttributeError, RuntimeError) as error:  # transformers' for one that layers differ in
        raise ValueError(f"{name} has no keys of one size in all layers ("
                         f"{str(error).split('. ')[0]}); {OTHER}") from None
    if getattr(config, "attn_temperature_tuning", False):
        raise ValueError(f"{name} scales attention by a token's place in the pass, not in its "
                         f"sequence (attn_temperature_tuning); {OTHER}")
    limits = {"positions (max_position_embeddings)": "max_position_embeddings",
              "chunk of attention (attention_chunk_size)": "attention_chunk_size"}
    if not kinds or "sliding_attention" in kinds:
        limits["sliding window (sliding_window)"] = "sliding_window"
    limits = {what: getattr(config, field, None) for what, field in limits.items()}
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            limits["length beyond which all positions change (longrope's "
                   "original_max_position_embeddings)"] = rope["original_max_position_embeddings"]
    for what, limit in limits.items():
        if limit and 0 < limit < max_tokens:
            raise ValueError(f"--max-tokens {max_tokens} is above {limit}, its {what}; lower it")


def check_layers(config, max_tokens: int) -> None:
    """Refuses layers that call attention in another form; they are made without memory and run."""
    name = config.architectures[0]
    with running(name), torch.device("meta"), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="ragged")
        if "logits_to_keep" not in signature(type(model).forward).parameters:
            raise ValueError(f"{name} cannot project chosen tokens alone: its forward takes no "
                             f"logits_to_keep; {OTHER}")
        if not model.supports_gradient_checkpointing:
            raise ValueError(f"{name} has no gradient checkpointing; {OTHER}")
        ids = torch.zeros(1, max_tokens, dtype=torch.long)
        with suppress(RuntimeError):  # an operation that meta tensors do not have
            model(input_ids=ids, position_ids=ids, lengths=[max_tokens],
                  logits_to_keep=ids[0, :1], use_cache=False)


@torch.no_grad()
def check_numbers(model, max_tokens: int) -> None:
    """Refuses a model in fp32 whose packed or cached passes differ from plain ones.

    Two texts that begin alike are read: plainly, in transformers' eager attention; packed, as in
    training; with a cache, as in rollouts. Meanwhile its matrices are doubled until two tokens that
    change places change a logit by 10 times the tolerance, since with small weights a wrong
    attention or position changes nothing; that is undone to the bit.
    """
    name, size = type(model).__name__, model.config.vocab_size
    draw = random.Random(0).choices
    begin = draw(range(size), k=8)
    texts = [begin + draw(range(size), k=k) for k in (12, 9)]
    turned = begin[1::-1] + texts[0][2:]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    model.eval().set_attn_implementation("eager")
    doubled = 0
    while True:
        with running(name, "cannot read a text"):
            *logits, other = (model(torch.tensor([text], device=model.device), use_cache=False)
                              .logits[0].float() for text in (*texts, turned))            # (l, V)
        largest = max(rows.abs().max().item() for rows in logits)
        change = (other - logits[0])[2:].abs().max().item()
        if doubled == DOUBLINGS or not change < 10 * TOLERANCE * largest:
            break
        torch._foreach_mul_(matrices, 2.0)
        doubled += 1
    model.set_attn_implementation("ragged")
    sharding.no_dropout(model)
    for how, run, expected in passes(model, texts, max_tokens):
        with running(name):
            error = (run() - expected(logits)).abs().max().item()
        if not error <= TOLERANCE * largest:
            raise ValueError(f"{name} gives log-probabilities that are {error:.2g} nats off {how}; "
                             f"{OTHER}")
    torch._foreach_mul_(matrices, 0.5 ** doubled)


def passes(model, texts: list[list[int]], max_tokens: int):
    """(how, run, expected) of each pass that phases make: run() gives numbers, and expected(plain
    logits of each text) what they should be."""
    sequences = [dpo.Trajectory(ids=ids, action_mask=[0] + [1] * (len(ids) - 1)) for ids in texts]
    yield ("in training", lambda: dpo.token_log_probs(model.train(), sequences),
           lambda plain: torch.cat([logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
                                    for logits, ids in zip(plain, texts)]))
    cache, held = SlotCache(model, len(texts), max(map(len, texts))), [0] * len(texts)
    cache.tokens = max_tokens  # what a window is compared with; these texts are shorter
    for new in ((6, 11), (1, 1), (1, 5)):  # two prompts, two tokens, a token beside a page
        segments = [(text, past, texts[text][past:past + n])
                    for text, (past, n) in enumerate(zip(held, new))]
        held = [past + len(ids) for _, past, ids in segments]
        yield ("in rollouts",
               lambda: next_token_logits(model.eval(), cache, segments).log_softmax(-1),
               lambda plain: torch.stack([logits[end - 1].log_softmax(-1)
                                          for logits, end in zip(plain, held)]))


@contextmanager
def running(name: str, fault="cannot read packed texts, whose attention has no mask"):
    """Whatever the model's own code raises becomes a ValueError that says where."""
    try:
        yield
    except FAULTS as error:
        at = Path(extract_tb(error.__traceback__)[-1].filename)
        if isinstance(error, ValueError) and at.parent.name in ("engine", "training"):
            raise  # it is said already
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if said == "'ragged'":  # a name that it looks up among its own
            fault, said = "has attention code of its own", type(error).__name__
        raise ValueError(f"{name} {fault} ({at.name}: {said}); {OTHER}") from None
