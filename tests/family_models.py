"""Tiny random models of some families of causal language models in transformers, one of each kind.

The names of a config's fields determine their sizes, since families share them. SPECIAL has
additional fields of single families. A model has every type of layer of its default config, and
every limit (a sliding window, a chunk) is shorter than the sequences of the tests.
"""

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

VOCABULARY = 160  # tokens
# size -> the fields of a config with this size
SIZES = {
    1: "n_group topk_group n_shared_experts",
    2: "num_hidden_layers n_layer decoder_layers encoder_layers num_key_value_heads num_kv_heads "
       "num_experts_per_tok linear_num_key_heads n_groups",
    4: "num_attention_heads n_head num_heads decoder_attention_heads encoder_attention_heads "
       "n_routed_experts num_local_experts linear_num_value_heads mamba_num_heads n_mamba_heads "
       "mamba_dt_rank time_step_rank",
    8: "head_dim linear_key_head_dim linear_value_head_dim mamba_d_state ssm_state_size state_size "
       "chunk_size block_size",
    16: "attention_head_dim mamba_head_dim sliding_window",
    32: "hidden_size d_model n_embd",
    48: "intermediate_size moe_intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim "
        "ffn_hidden_size moe_shared_expert_intermediate_size",
    64: "attention_hidden_size",
    512: "max_position_embeddings n_positions"}
SIZES = {name: size for size, names in SIZES.items() for name in names.split()}
KINDS = "layer_types mlp_layer_types layers_block_type"  # of layers, a name for each
SPECIAL = {  # additional fields of a family
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "minimax": dict(layer_types=["linear_attention", "full_attention"], sliding_window=None),
    "zamba": dict(num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid"] * 2)}


def small(config, vocabulary: int) -> dict:
    """Returns small values for the fields of a config, with two layers or one of each type."""
    fields = {name: value for name, value in vars(config).items() if value is not None}
    values = {name: size for name, size in SIZES.items() if name in fields}
    values |= {name: 1 for name in fields if name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    for name, value in (("vocab_size", vocabulary), ("head_dim", 8), ("sliding_window", 16),
                        ("is_decoder", True), ("use_sliding_window", True)):  # or None by default
        values |= {name: value} if name in vars(config) else {}
    values |= {name: small(value, vocabulary) for name, value in fields.items()
               if isinstance(value, PreTrainedConfig)}
    if fields.get("num_key_value_heads") == fields.get("num_attention_heads"):
        values["num_key_value_heads"] = 4
    kinds = {name: dict.fromkeys(fields[name]) for name in KINDS.split() if name in fields}
    if "layer_types" in kinds and "sliding_window" in values:
        kinds["layer_types"]["sliding_attention"] = None
    if kinds:
        layers = max(2, *map(len, kinds.values()))
        values |= {name: (list(some) * layers)[:layers] for name, some in kinds.items()}
    values |= SPECIAL.get(config.model_type, {})
    if kinds:
        values["num_hidden_layers"] = len(values.get("layer_types") or values[min(kinds)])
    return values


def tiny_model(family: str, vocabulary: int = VOCABULARY, kind: str = "", **more):
    """Returns a model in float32 and eval mode, in which every token has an effect. `more` are
    fields of its config. `kind` is the name of a multimodal class."""
    config = CONFIG_MAPPING[family]()
    config = config if kind else config.get_text_config()
    config = type(config)(**{**small(config, vocabulary), **more})
    kind = getattr(transformers, kind or CLASSES.get(config.model_type, CLASSES[family]))
    torch.manual_seed(0)
    return enlarged(kind._from_config(config, dtype=torch.float32))


@torch.no_grad()
def enlarged(model):
    """Randomises all weights, and doubles matrices until swapping two tokens changes later
    log-probabilities. With small weights, wrong attention or positions would have no effect."""
    for p in model.eval().parameters():
        p += 0.1 * torch.randn(p.shape)
    for _ in range(4):
        if swapped(model) > 0.3:
            break
        torch._foreach_mul_([p for p in model.parameters() if p.ndim > 1], 2.0)
    return model


@torch.no_grad()
def swapped(model) -> float:
    """Returns the largest change of later log-probabilities if two tokens are swapped, in nats."""
    ids = torch.randint(2, 100, (2, 12), generator=torch.Generator().manual_seed(1))
    ids[1] = ids[0, [1, 0, *range(2, 12)]]
    a, b = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    return (a - b)[2:].abs().max().item()
