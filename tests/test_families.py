"""Every family of causal language models that transformers knows: right here, or refused."""

import copy
import random
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import transformers
from conftest import Toy, make_tokenizer
from test_rollout import Echo
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from lab import tokens as dpo
from lab.engine import prepacked, sharding
from lab.harness.settings import SettingsError
from lab.playing.rollout import Sampling, rollout
from lab.training import probe
from lab.training.models import CAUSAL_LMS

DOCS = (Path(__file__).parent.parent / "docs" / "large_models.md").read_text(encoding="utf-8")
LONGEST = 64  # tokens of an episode
# What the fields of a config are set to where a family has them: some thousand numbers in all.
SIZES = {
    1: "n_group topk_group first_k_dense_replace num_expert_group pad_token_id bos_token_id "
       "eos_token_id",
    2: "num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers num_blocks "
       "num_decoder_layers num_encoder_layers num_key_value_heads num_experts_per_tok moe_topk "
       "moe_k top_k_experts index_n_heads num_encoder_attention_heads num_kv_heads "
       "num_decoder_attention_heads zero_expert_num",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads num_experts "
       "encoder_attention_heads n_routed_experts num_local_experts moe_num_experts rotary_dim",
    8: "kv_lora_rank qk_rope_head_dim qk_nope_head_dim index_head_dim dim_head kv_channels "
       "hidden_size_per_layer_input attention_head_dim global_head_dim router_hidden_size",
    12: "v_head_dim",
    16: "q_lora_rank laurel_rank input_embedding_size output_embedding_size",
    32: "hidden_size d_model n_embd emb_dim embedding_size attention_hidden_size",
    48: "intermediate_size moe_intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim "
        "dff dim_ff shared_expert_intermediate_size ffn_hidden_size expert_ffn_hidden_size "
        "intermediate_size_mlp dense_intermediate_size shared_intermediate_size "
        "pronunciation_embed_dim shape_embed_dim pronunciation_vocab_size shape_vocab_size",
    400: "vocab_size vocab_size_per_layer_input",
    512: "max_position_embeddings n_positions max_seq_len n_ctx model_max_length"}
SIZES = {name: size for size, names in SIZES.items() for name in names.split()}
SPECIAL = {  # what a family wants beside
    "cohere_compass_text": dict(rope_parameters={kind: dict(
        rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
        for kind in ("full_attention", "sliding_attention")}),
    "dbrx": dict(attn_config=dict(rope_theta=1e4, kv_n_heads=2, clip_qkv=8.0),
                 ffn_config=dict(ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2)),
    "deepseek_v2": dict(num_experts_per_tok=2),
    "diffllama": dict(attention_dropout=0.0),  # it refuses any
    "dots1": dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2),
    "gemma3n_text": dict(num_kv_shared_layers=0),
    "gpt_bigcode": dict(num_key_value_heads=1),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "llama4_text": dict(attn_temperature_tuning=False),  # with it, it is refused
    "nemotron": dict(num_key_value_heads=2),
    "phi3": dict(rope_parameters=dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4,
                                      long_factor=[2.0] * 4)),
    "phi4_multimodal": dict(
        vision_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1),
        audio_config=dict(hidden_size=32, intermediate_size=48, num_blocks=1,
                          nemo_conv_channels=8)),
    "reformer": dict(is_decoder=True, axial_pos_embds=False),
    "xmod": dict(default_language="en_XX")}
LIMITS = ("sliding_window", "sliding_window_size", "local_attention", "attention_chunk_size",
          "original_max_position_embeddings")
REASONS = {  # heading in docs/large_models.md -> what the refusal says
    "layers that are not full attention": "has layers of type",
    "more than text": "reads more than text",
    "attention code of their own": "attention code of its own|is not told where sequences begin",
    "keys of another size than the config's, or than the values": "key heads of|values of|one size",
    "a mask of their own": "mask of the model's own",
    "capped scores, attention sinks": "softcap|s_aux",
    "attention more than once a layer": "attends more than once",
    "no choice of the tokens that are projected": "logits_to_keep",
    "no gradient checkpointing": "gradient checkpointing",
    "code that packed texts break": "cannot read packed texts",
    "other numbers than in a plain pass": "log-probabilities that are"}
check_numbers = probe.check_numbers
ENCODER = dpo.Encoder(make_tokenizer("chatml"))


@pytest.fixture(autouse=True)
def no_model_is_small(monkeypatch):
    """Rollouts with weights in another order, as those of models that are not as tiny as these."""
    monkeypatch.setattr(prepacked, "SMALL", 0)


def default(family):
    """Its config as transformers has it; one family's is refused by its own checks."""
    sizes = dict(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
    config = CONFIG_MAPPING[family](
        **dict(text_config=sizes) if family == "gemma4_assistant" else {})
    config.architectures = [CAUSAL_LMS[family]]
    return config


def tiny(family, limit=LONGEST):
    """A config as small as can be, with each type of layer and dropout wherever it has a rate.

    limit: of tokens, where it has one, such as a sliding window.
    """
    kind, fields = CONFIG_MAPPING[family], vars(default(family))
    has = {field: value for field, value in fields.items() if value is not None}
    values = {field: size for field, size in SIZES.items() if field in has}
    values |= {field: value for field, value in [
        ("head_dim", 8), ("use_sliding_window", True), ("is_decoder", True),
        *((field, limit) for field in LIMITS)] if field in fields}
    if has.get("num_key_value_heads", 0) == has.get("num_attention_heads"):
        values["num_key_value_heads"] = 4
    for field in ("layer_types", "mlp_layer_types"):
        if field in has:
            each = dict.fromkeys(has[field])
            if field == "layer_types" and "sliding_window" in fields:
                each["sliding_attention"] = None
            values["num_hidden_layers"] = max(values["num_hidden_layers"], len(each))
            values[field] = (list(each) * 9)[:values["num_hidden_layers"]]
    for field, value in has.items():
        if ("drop" in field or "jitter" in field) and type(value) in (int, float):
            values[field] = 0.3
    config = kind(**{**values, **SPECIAL.get(family, {})})
    config.architectures = [CAUSAL_LMS[family]]
    return config


def random_model(config):
    """A model of it in fp32, of which every number of every layer matters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32,
                                             attn_implementation="ragged")
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape)
    return model


def checked(config):
    """(model, None), random, if a run would take it, else (None, why not)."""
    try:
        probe.check_config(config, LONGEST)
        probe.check_layers(config, LONGEST)
        model = random_model(config)
        probe.check_numbers(model, LONGEST)
    except ValueError as error:
        return None, str(error)
    return model, None


def log_probs(model, ids):
    """(l, V), by transformers alone."""
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    found = model(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    model.set_attn_implementation("ragged")
    return found


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                      for p in model.parameters()])


def assert_right(model):
    """Log-probabilities and gradient, packed and alone, and a greedy rollout in slots."""
    rng = random.Random(1)
    a, b = ([rng.randrange(1, 400) for _ in range(n)] for n in (LONGEST, 30))
    texts = [dpo.Trajectory(ids=ids, action_mask=[0, 0] + [1] * (len(ids) - 2))
             for ids in (a, a[:20] + b)]
    model.eval()
    theirs = torch.stack([log_probs(model, t.ids)[range(1, len(t.ids) - 1), t.ids[2:]].sum()
                          for t in texts])
    weight = torch.tensor([0.3, -1.7])
    expected = gradient(model, (theirs * weight).sum())
    sharding.no_dropout(model)
    model.train()
    packed = dpo.action_log_probs(model, texts)
    alone = torch.cat([dpo.action_log_probs(model, [t]) for t in texts])
    for ours in (packed, alone):
        assert (ours - theirs).abs().max() < 1e-4, ours - theirs
        off = gradient(model, (ours * weight).sum()) - expected
        assert off.norm() < 1e-4 * expected.norm()
    episodes = [dpo.Trajectory(str(task)) for task in range(3)]
    player = copy.deepcopy(model.eval())
    prepacked.prepack(player)
    rollout(player, ENCODER, Echo, episodes, Sampling(
        0.0, max_tokens=LONGEST, max_new_tokens=5, tokens_per_forward=100, slots=2))
    for e in episodes:
        with torch.no_grad():
            plain = log_probs(model, e.ids)[:-1]
        plain[:, ENCODER.suppress_tokens(plain.shape[1])] = -torch.inf
        drawn = plain[range(len(plain)), e.ids[1:]]
        assert sum(e.action_mask) > 2
        assert ((plain.amax(-1) - drawn)[torch.tensor(e.action_mask[1:]) > 0] < 1e-4).all()


def outcome(family) -> str:
    """The heading under which docs/large_models.md has to list a family, found anew."""
    model = refused = None
    if family not in SPECIAL:  # what its default shows needs no model
        try:
            probe.check_config(default(family), 1)
        except ValueError as error:
            refused = str(error)
    if not refused:
        model, refused = checked(tiny(family))
    if refused:
        return next((heading for heading, says in REASONS.items() if re.search(says, refused)),
                    f"refused for something new: {refused}")
    assert_right(model)
    if not set(LIMITS).isdisjoint(vars(model.config)):
        model, refused = checked(tiny(family, LONGEST // 2))
        assert refused or assert_right(model) is None
    return "right"


def listed() -> dict:
    """family -> the heading under which docs/large_models.md lists it."""
    return {family: heading for heading, families in
            re.findall(r"^- \*\*(.+?)\*\*.*?: (.+)$", DOCS, re.MULTILINE)
            for family in re.findall("`(.+?)`", families)}


@pytest.mark.parametrize("family", CAUSAL_LMS)
def test_a_family_is_right_or_refused_before_any_phase_and_listed(family):
    found = outcome(family)
    if f"transformers {transformers.__version__}" in DOCS:
        assert listed().get(family) == found, "python tests/test_families.py prints the lists"


def with_weights(family, size, norms):
    """A model whose matrices are normal, of this standard deviation; its norms' weights too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(family), dtype=torch.float32,
                                             attn_implementation="ragged")
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, size)
            elif norms:
                p *= size
    return model


@pytest.mark.parametrize("family", ["bloom", "xglm", "roformer", "rembert", "codegen", "phimoe"])
def test_a_wrong_family_is_found_however_small_its_weights_are(family):
    for size, norms in ((1e-4, False), (1e-3, False), (0.02, False), (0.02, True), (1.0, False)):
        with pytest.raises(ValueError, match="log-probabilities that are"):
            probe.check_numbers(with_weights(family, size, norms), LONGEST)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "mistral", "gemma", "phi",
                                    "smollm3", "mixtral", "bert", "nanochat"])
def test_a_right_family_passes_whatever_its_weights_and_keeps_them(family):
    for size, norms in ((1e-4, False), (1e-3, False), (0.02, True), (3.0, False)):
        for dtype in (torch.float32, torch.bfloat16):  # as they were saved
            model = with_weights(family, size, norms).to(dtype).float()
            before = copy.deepcopy(model.state_dict())
            probe.check_numbers(model, LONGEST)
            assert all(torch.equal(before[key], p) for key, p in model.state_dict().items())


@pytest.mark.parametrize("family", ["gpt_neox", "mistral"])
def test_other_families_run_the_whole_loop(family, toy_run, tmp_path, monkeypatch):
    """Layers elsewhere, no number of key heads; a sliding window as long as an episode. The
    numbers are compared once, before the first phase."""
    compared = []
    monkeypatch.setattr(probe, "check_numbers", lambda model, longest: (
        compared.append(longest), check_numbers(model, longest)))
    config = tiny(family, limit=256)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    ENCODER.tokenizer.save_pretrained(tmp_path / "model")
    folder = toy_run(Toy, "--model", tmp_path / "model")
    assert (folder / "result.json").exists() and compared == [256]
    (folder / "result.json").unlink()
    toy_run(Toy, "--model", tmp_path / "model")
    assert (folder / "result.json").exists() and compared == [256]
    with pytest.raises(SettingsError, match="is above 256, its sliding window|above 512, its posi"):
        toy_run(Toy, "--model", tmp_path / "model", "--max-tokens", 600,
                "--out", tmp_path / "other")


if __name__ == "__main__":
    found = defaultdict(list)
    for family in CAUSAL_LMS:
        found[outcome(family)].append(f"`{family}`")
    for heading, families in found.items():
        print(f"- **{heading}** ({len(families)}): {', '.join(families)}")
