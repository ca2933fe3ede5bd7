"""Whether packed passes and the cache serve a model; and attention in fp32 on a GPU."""

import random
from types import SimpleNamespace

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import dpo
from lab.fast import cache, packing

ROPES = ("default", "linear", "llama3", "yarn")  # whose positions mean the same in every pass
MOST = 1e-3  # nats that packed and cached log-probabilities may be off plain ones [ours]


def why_not(model, encoder: dpo.Encoder, s) -> str | None:
    """Why this model, in fp32 on the CPU, has to run plainly; None where packed passes and cached
    replies gave what plain ones give."""
    c = model.config.get_text_config()
    rope = (getattr(c, "rope_parameters", None) or {}).get("rope_type", "default")
    if {*(getattr(c, "layer_types", None) or ())} - {"full_attention"} or rope not in ROPES:
        return "its layers are not all of plain causal attention"
    if (getattr(c, "max_position_embeddings", None) or s.max_tokens) < s.max_tokens:
        return "--max-tokens is above its positions"
    plain, rng = model.config._attn_implementation, random.Random(0)
    never = encoder.never(c.vocab_size)
    sampler = dpo.Sampler(0.7, (*never, encoder.end_of_turn))
    begin, *ends = ([rng.randrange(len(encoder.tokenizer)) for _ in range(n)] for n in (12, 28, 9))
    try:
        model.set_attn_implementation("ragged")
        asked = [(dpo.Trajectory(ids=begin + ids), random.Random(n)) for n, ids in enumerate(ends)]
        replies = cache.Cached(model, encoder, sampler, (), s)(asked)
        whole = [dpo.Trajectory(ids=t.ids + new, action_mask=[0] * len(t.ids) + [1] * len(new))
                 for (t, _), (new, _) in zip(asked, replies)]
        with torch.no_grad():
            packed = packing.token_log_probs(model, whole, sampler)
            model.set_attn_implementation(plain)
            expected = torch.cat([dpo.token_log_probs(model, [t], sampler) for t in whole])
        drawn = torch.tensor([x for _, values in replies for x in values])
        off = max((packed - expected).abs().max(), (drawn - expected).abs().max()).item()
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        return f"its code takes another way ({type(error).__name__})"
    finally:
        model.set_attn_implementation(plain)
    return None if off < MOST else f"its log-probabilities would be {off:.2g} nats off"


def repeated_attention(module, query, key, value, attention_mask, **how):
    """transformers' attention with each key and value once for every head that reads it. In fp32 no
    fused kernel of CUDA's takes fewer keys than queries, and all scores would be stored."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    plain = SimpleNamespace(is_causal=getattr(module, "is_causal", True))  # of no groups
    return sdpa_attention_forward(plain, query, key, value, attention_mask, **how)


AttentionInterface.register("repeated", repeated_attention)
AttentionMaskInterface.register("repeated", sdpa_mask)
