"""Whether packed passes and the cache serve a model; and attention in fp32 on a GPU."""

import random
from types import SimpleNamespace

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import dpo
from common.settings import Instead
from lab.fast import cache, packing

ROPES = ("default", "linear", "llama3", "yarn")  # whose positions mean the same in every pass
MOST = 1e-3  # nats that packed and cached log-probabilities may be off plain ones [ours]


def why_not(model, encoder: dpo.Encoder, s) -> str | None:
    """Says why a model has to run plainly.

    Args:
        model: In fp32, on the CPU; it is as it was afterwards.
        encoder: Of its tokenizer.
        s: Settings; those of `cache.Cached` are asked for.

    Returns:
        A reason; None where packed passes and cached replies give what plain ones give.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"} or rope.get("rope_type", "default") not in ROPES:
        return "its layers are not all of plain causal attention"
    if s.max_tokens > dpo.positions_of(config):
        return "--max-tokens is above its positions"

    plain = model.config._attn_implementation
    try:
        error = error_of_fast(model, encoder, s, plain)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        return f"its code takes another way ({type(error).__name__})"
    finally:
        model.set_attn_implementation(plain)
    return None if error < MOST else f"its log-probabilities would be {error:.2g} nats off"


def error_of_fast(model, encoder: dpo.Encoder, s, plain: str) -> float:
    """How far log-probabilities of two packed and cached random texts, which begin alike, are off
    those of plain passes, in nats; plain: the name of the attention of these."""
    rng = random.Random(0)
    known = sorted(encoder.known)
    opening = rng.choices(known, k=12)
    never = (*encoder.sampler().never, encoder.end_of_turn)  # so that replies are long
    sampler = dpo.Sampler(0.7, never)

    model.set_attn_implementation("ragged")
    # Two texts want two slots that they fit, however few and short those of the run are.
    s = Instead(s, slots=2, max_tokens=max(s.max_tokens, 64))
    asked = []
    for n, size in enumerate((28, 9)):
        asked.append((dpo.Trajectory(ids=opening + rng.choices(known, k=size)), random.Random(n)))
    drawn, whole = [], []
    for (t, _), (reply, values) in zip(asked, cache.Cached(model, encoder, sampler, (), s)(asked)):
        mask = [0] * len(t.ids) + [1] * len(reply)
        whole.append(dpo.Trajectory(ids=t.ids + reply, action_mask=mask))
        drawn += values
    with torch.no_grad():
        packed = packing.token_log_probs(model, whole, sampler)                   # (A,)
        model.set_attn_implementation(plain)
        expected = torch.cat([dpo.token_log_probs(model, [t], sampler) for t in whole])
    of_passes = (packed - expected).abs().max()
    of_replies = (torch.tensor(drawn) - expected).abs().max()
    return max(of_passes, of_replies).item()


def repeated_attention(module, query, key, value, attention_mask, **options):
    """transformers' attention with each key and value once for every head that reads it. In fp32 no
    fused kernel of CUDA's takes fewer keys than queries, and all scores would be stored."""
    times = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(times, 1)
    value = value.repeat_interleave(times, 1)
    plain = SimpleNamespace(is_causal=getattr(module, "is_causal", True))  # of no groups
    return sdpa_attention_forward(plain, query, key, value, attention_mask, **options)


AttentionInterface.register("repeated", repeated_attention)
AttentionMaskInterface.register("repeated", sdpa_mask)
