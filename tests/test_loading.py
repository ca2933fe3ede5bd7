"""One rank reads a model and hands it out: to the bit what each rank would read, in less memory."""

import json
import os
import shutil

import pytest
import torch
from accelerate.utils import gather_object
from conftest import in_ranks, make_tokenizer, peak
from test_families import log_probs, random_model, tiny
from torch.distributed.tensor import DTensor

from lab import tokens as dpo
from lab.engine import sharding
from lab.harness.settings import SettingsError
from lab.program import dry_run
from lab.training import models
from lab.training.models import check_model, load_model

# Tied embeddings (gemma3_text, bert with a bias), scaled ones (gemma3_text), experts that are fused
# on loading (mixtral), learned positions (gpt2), a rotary embedding (llama).
FAMILIES = ("llama", "mixtral", "gemma3_text", "gpt2", "bert")


def tensors(model):
    """name -> parameter or buffer, saved or not, under each of its names."""
    return {**dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False))}


def ties(model):
    """For each of `tensors`, which is the first that is the same one."""
    numbers = list(map(id, tensors(model).values()))
    return [numbers.index(number) for number in numbers]


def assert_same(model, expected):
    ours, read = tensors(model), tensors(expected)
    assert list(ours) == list(read) and ties(model) == ties(expected)
    for name, tensor in ours.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert whole.dtype == read[name].dtype and torch.equal(whole, read[name]), name
    for module in model.modules():  # what is neither parameter nor buffer has its data, too
        assert not any(isinstance(value, torch.Tensor) and value.is_meta
                       for value in vars(module).values())


def written(accelerator, config, folder):
    """A folder with a model in bf16, in several files."""
    if accelerator.is_main_process:
        random_model(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
        assert (folder / "model.safetensors.index.json").exists()
    accelerator.wait_for_everyone()
    return folder


def compare(accelerator, folder, family):
    """Sharded, whole, as a copy that plays, and saved again: always what `from_pretrained` gives."""
    main = accelerator.is_main_process
    expected = load_model(written(accelerator, tiny(family), folder))
    whole = sharding.shard_model(accelerator, load_model(folder, data=main), shard=False)
    assert_same(whole.module, expected)
    model = load_model(folder, data=main)
    assert main != all(tensor.is_meta for tensor in tensors(model).values())
    model = sharding.shard_model(accelerator, model, shard=True, recompute=True)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_same(model, expected)

    for dtype in (torch.float32, torch.bfloat16):
        copy = load_model(folder, dtype, data=False)
        assert_same(sharding.whole(accelerator, model, lambda: copy), load_model(folder, dtype))
    sharding.save(accelerator, model, folder / "again")
    accelerator.wait_for_everyone()
    # What was tied is in that file twice: the rank that reads it ties it.
    again = sharding.shard_model(accelerator, load_model(folder / "again", data=main), shard=True)
    assert_same(again, expected)


def memory(accelerator, folder):
    """Of a model of 16 layers, in fp32: its bytes, and the most that each rank holds of them."""
    config = tiny("llama")
    config.num_hidden_layers, config.vocab_size = 16, 100
    written(accelerator, config, folder)
    model = load_model(folder, data=False)
    numbers, *parts = dry_run.sizes(model)  # a rank's shards, and a layer, or what is outside of them
    each = peak(lambda: sharding.shard_model(accelerator, load_model(folder), True))
    one = peak(lambda: sharding.shard_model(
        accelerator, load_model(folder, data=accelerator.is_main_process), True))
    return gather_object([dict(
        planned=4 * (numbers / accelerator.num_processes + max(parts)),
        bytes=4 * model.num_parameters(), each=each, one=one)])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_gets_the_bits_that_it_would_read(family, tmp_path):
    in_ranks(2, compare, tmp_path, family)


def test_only_the_rank_that_reads_ever_holds_a_whole_model(tmp_path):
    """The other holds its half and one part of 17 whole, as planned; read by each, both all.

    Gloo may let go of a part that it has sent when the next one is there already: two parts.
    """
    first, other = in_ranks(2, memory, tmp_path)
    assert first["each"] > first["bytes"] and other["each"] > other["bytes"]
    assert first["one"] > first["bytes"] and other["one"] < (1 / 2 + 2 / 17) * other["bytes"]
    assert other["one"] == pytest.approx(other["planned"], rel=0.1)


SWITCHES = (  # keys of a config.json that say how a pass computes or what it returns
    *(dict(_attn_implementation=name) for name in ("sdpa", "eager", "flash_attention_2")),
    dict(_attn_implementation={"": "sdpa"}), dict(attn_implementation="eager"),
    dict(_attn_implementation="eager", output_attentions=True), dict(output_attentions=True),
    dict(output_hidden_states=True), dict(use_cache=False), dict(return_dict=False), dict(torchscript=True))


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_no_switch_in_a_config_changes_what_a_model_computes(family, tmp_path):
    """Packed texts, as transformers reads each alone, whatever the folder's config switches."""
    random_model(tiny(family)).save_pretrained(tmp_path)
    make_tokenizer("chatml").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    texts = [dpo.Trajectory(ids=[5, 6, 7, *more], action_mask=[0] * 3 + [1] * 12)
             for more in (range(20, 32), range(50, 62))]
    for switch in ({}, *SWITCHES):
        (tmp_path / "config.json").write_text(json.dumps(config | switch))
        check_model(tmp_path, 32)
        model = load_model(tmp_path)
        with torch.no_grad():
            ours = dpo.action_log_probs(model, texts)
            alone = [log_probs(model, t.ids)[range(2, 14), t.ids[3:]].sum() for t in texts]
        assert ours.tolist() == pytest.approx(torch.stack(alone).tolist(), abs=1e-4), switch
        model.save_pretrained(tmp_path / "again")
        saved = json.loads((tmp_path / "again/config.json").read_text())
        assert not {"_attn_implementation", "attn_implementation"} & {*saved}, switch


@pytest.mark.parametrize("damage", [
    shutil.rmtree, lambda folder: os.truncate(folder / "model.safetensors", 1_000_000)])
def test_a_damaged_shipped_model_is_one_line_with_both_remedies(tmp_path, monkeypatch, damage):
    folder = shutil.copytree(models.TINY, tmp_path / "tiny")
    monkeypatch.setattr(models, "TINY", folder)
    damage(folder)
    with pytest.raises(SettingsError, match="git checkout.*bash run.sh pretrain"):
        check_model(str(folder), 256)


def test_a_model_without_a_padding_token_is_used(small_model, tmp_path):
    """As published Llama and Mistral have it, in the config and in the tokenizer."""
    folder = shutil.copytree(small_model, tmp_path / "model")
    for name, key in (("config.json", "pad_token_id"), ("tokenizer_config.json", "pad_token")):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {key: None}))
    check_model(folder, 256)
    assert load_model(folder).config.pad_token_id is None
