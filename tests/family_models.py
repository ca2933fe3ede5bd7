"""Tiny random models of all families of causal language models in transformers.

The names of a config's fields determine their sizes, since most families share them. SPECIAL has
additional fields of single families. A model has every type of layer of its default config, and
every limit (a sliding window, a chunk) is shorter than the sequences of the tests.
"""

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

MUSIC = ("musicgen", "musicgen_melody")  # their tokens are sounds
VOCABULARY, WINDOW = 160, 16  # tokens
# size -> the fields of a config with this size
SIZES = {
    1: "n_group topk_group first_k_dense_replace num_expert_group num_dense_layers moe_layer_freq "
       "n_shared_experts num_shared_experts moe_num_shared_experts num_layers_per_stack "
       "moe_layer_start_index prefix_dense_sliding_window_pattern",
    2: "num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers num_blocks "
       "num_decoder_layers num_encoder_layers num_key_value_heads num_experts_per_tok moe_topk "
       "moe_k top_k_experts num_experts_per_token num_encoder_attention_heads num_kv_heads "
       "o_groups num_decoder_attention_heads zero_expert_num linear_num_key_heads mamba_n_groups "
       "n_groups mamba_ngroups swa_num_key_value_heads num_local_experts_per_tok moe_top_k",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads num_experts "
       "encoder_attention_heads n_routed_experts num_local_experts moe_num_experts rotary_dim "
       "linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads n_mamba_heads "
       "swa_num_attention_heads attention_heads d_rel mamba_dt_rank time_step_rank "
       "num_query_groups hc_lowrank adapter_rank index_topk_blocks index_block_size",
    8: "kv_lora_rank qk_rope_head_dim qk_nope_head_dim index_head_dim dim_head kv_channels "
       "head_dim hidden_size_per_layer_input global_head_dim router_hidden_size d_head "
       "linear_head_dim linear_key_head_dim linear_value_head_dim swa_head_dim mamba_d_state "
       "ssm_state_size state_size o_lora_rank index_topk attention_head_size gated_norm_rank "
       "mamba_chunk_size chunk_size block_size ple_embed_dim",
    12: "v_head_dim",
    16: "index_n_heads attention_head_dim q_lora_rank laurel_rank input_embedding_size "
        "output_embedding_size mamba_d_head mamba_head_dim mamba_headdim dim_model_base "
        "encoder_hash_byte_group_vocab",
    32: "hidden_size d_model n_embd emb_dim embedding_size lru_width "
        "word_embed_proj_dim embedding_dim hidden_size_global backbone_hidden_size",
    48: "intermediate_size moe_intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim "
        "dff dim_ff shared_expert_intermediate_size ffn_hidden_size expert_ffn_hidden_size d_inner "
        "intermediate_size_mlp dense_intermediate_size shared_intermediate_size feed_forward_size "
        "pronunciation_embed_dim shape_embed_dim pronunciation_vocab_size shape_vocab_size "
        "moe_shared_expert_intermediate_size shared_experts_intermediate_size",
    64: "mamba_d_ssm attention_hidden_size",
    512: "max_position_embeddings n_positions max_seq_len n_ctx model_max_length context_length"}
SIZES = {name: size for size, names in SIZES.items() for name in names.split()}
SIZES |= dict.fromkeys("sliding_window sliding_window_size local_attention attention_chunk_size "
                       "window_size attention_window_size rel_extent keep_window_size "
                       "local_attention_window_len local_attn_chunk_length lsh_attn_chunk_length "
                       .split(), WINDOW)
VOCABULARIES = "vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size"
KINDS = "layer_types mlp_layer_types layers_block_type"  # of layers, a name for each
SPECIAL = {  # additional fields of a family
    "bamba": dict(attn_layer_indices=[1]),
    "cohere_compass_text": dict(rope_parameters={kind: dict(
        rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
        for kind in ("full_attention", "sliding_attention")}),
    "dbrx": dict(attn_config=dict(rope_theta=1e4, kv_n_heads=2, clip_qkv=8.0),
                 ffn_config=dict(ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2)),
    "deepseek_v2": dict(num_experts_per_tok=2),
    "dots1": dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2),
    "dots3_note_text": {f"swa_{name}": value for name, value in dict(
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=8, head_dim=16,
        qk_nope_head_dim=8, v_head_dim=12).items()},
    "gemma3n_text": dict(num_kv_shared_layers=2, num_hidden_layers=4,
                         layer_types=["sliding_attention", "full_attention"] * 2),
    "gemma4_text": dict(num_kv_shared_layers=2, num_hidden_layers=4, global_head_dim=16,
                        layer_types=["sliding_attention", "full_attention"] * 2,
                        enable_moe_block=True, num_experts=4, top_k_experts=2,
                        moe_intermediate_size=48),
    "gemma4_unified_text": dict(global_head_dim=16),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "granitemoehybrid": dict(layer_types=["linear_attention", "full_attention"]),
    "hrm_text": dict(H_cycles=2, L_cycles=1, num_layers_per_stack=1, num_hidden_layers=4),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "laguna": dict(num_attention_heads_per_layer=[4, 4]),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "mamba2": dict(head_dim=16),
    "minimax_m3_vl_text": dict(index_n_heads=2, layer_types=[
        "minimax_m3_sparse", "full_attention"]),
    "minimax": dict(layer_types=["linear_attention", "full_attention"], sliding_window=None),
    "nemotron": dict(num_key_value_heads=2),
    "phi3": dict(rope_parameters=dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4,
                                      long_factor=[2.0] * 4)),
    "phi4_multimodal": dict(
        vision_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1),
        audio_config=dict(hidden_size=32, intermediate_size=48, num_blocks=1,
                          nemo_conv_channels=8)),
    "qwen4_exp_text": dict(indexer_n_heads=16, indexer_kv_heads=1, indexer_head_dim=8,
                           indexer_budget=8, indexer_compress_ratio=4),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"]),
    "reformer": dict(axial_pos_embds=False),
    "rwkv": dict(attention_hidden_size=32),
    "xlstm": dict(hidden_size=128, embedding_dim=128),
    "xlm": dict(causal=True),
    "xlnet": dict(attn_type="uni"),
    "xmod": dict(default_language="en_XX"),
    "zamba": dict(num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid"] * 2),
    "zaya": dict(num_experts_per_tok=1, layer_types=["hybrid", "hybrid_sliding"])}


def default(family: str):
    """Returns the default config, or for a composite family, the default of its text model."""
    parts = {"text_config": dict(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)}
    config = CONFIG_MAPPING[family](**parts if family.endswith("assistant") else {})
    return config.get_text_config() if family not in MUSIC else config


def small(config, vocabulary: int) -> dict:
    """Returns small values for the fields of a config, with two layers or one of each type."""
    fields = {name: value for name, value in vars(config).items() if value is not None}
    values = {name: size for name, size in SIZES.items() if name in fields}
    for size, names in ((vocabulary, VOCABULARIES), (1, "pad_token_id bos_token_id eos_token_id")):
        values |= {name: size for name in names.split() if name in fields}
    for name, value in (("head_dim", 8), ("sliding_window", WINDOW), ("is_decoder", True),
                        ("use_sliding_window", True)):  # also where the default is None
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
    config = CONFIG_MAPPING[family]() if kind else default(family)
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
