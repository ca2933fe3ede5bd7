"""Tiny random models of some families of causal language models in transformers, one of each kind.

In all of them every token has an effect, and a sliding window is shorter than the sequences of the
tests.
"""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

# Each config gets those fields that it has, by its own names.
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, decoder_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=16,
             max_position_embeddings=512, is_decoder=True, bos_token_id=1, eos_token_id=1,
             pad_token_id=1)
MORE = {  # additional fields of a family
    "gemma3_text": dict(layer_types=["sliding_attention", "full_attention"]),
    # Longrope uses other angles for all tokens if one of them is beyond position 64.
    "phi3": dict(original_max_position_embeddings=64, rope_parameters=dict(
        rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4,
        original_max_position_embeddings=64)),
    "zamba": dict(num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid"] * 2)}


@torch.no_grad()
def tiny_model(family: str, vocabulary: int = 160, seed: int = 0, **more):
    """Returns a model in float32 and eval mode. `more` are fields of its config."""
    default = CONFIG_MAPPING[family]()
    fields = {name: size for name, size in SIZES.items() if hasattr(default, name)}
    fields |= MORE.get(family, {}) | more
    torch.manual_seed(seed)
    config = type(default)(vocab_size=vocabulary, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for p in model.eval().parameters():  # also of norms and biases, which begin at 1 and 0
        p += 0.15 * torch.randn(p.shape)
    return model
