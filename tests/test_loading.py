"""One rank reads a model and hands it out: to the bit what each rank would read, in less memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if __name__ == "__main__":  # a rank of the tests below
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from accelerate import Accelerator
from test_families import tiny
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from engine import sharding
from harness import dry_run
from harness.models import load_model

# Tied embeddings (gemma, bert with a bias), experts that are fused on loading (mixtral, qwen3_moe),
# scaled embeddings (gemma3_text), learned positions (gpt2), a rotary embedding in each.
FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma", "gemma3_text", "gpt_neox",
            "gpt2", "bert")


def tensors(model):
    """name -> parameter or buffer, saved or not, under each of its names."""
    return {**dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False))}


def ties(model):
    """For each of `tensors`, which is the first that is the same one."""
    found = list(map(id, tensors(model).values()))
    return [found.index(tensor) for tensor in found]


def assert_same(model, expected):
    ours, theirs = tensors(model), tensors(expected)
    assert list(ours) == list(theirs) and ties(model) == ties(expected)
    for name, tensor in ours.items():
        found = tensor.detach()
        found = found.full_tensor() if isinstance(found, DTensor) else found
        assert found.dtype == theirs[name].dtype and torch.equal(found, theirs[name]), name
    for module in model.modules():  # what is neither parameter nor buffer has its data, too
        assert not any(isinstance(value, torch.Tensor) and value.is_meta
                       for value in vars(module).values())


def random_model(accelerator, config, folder):
    """A folder with a model in bf16, in several files."""
    if accelerator.is_main_process:
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for p in model.parameters():
            p.data += 0.1 * torch.randn(p.shape)
        model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
        assert (folder / "model.safetensors.index.json").exists()
    accelerator.wait_for_everyone()
    return folder


def compare(accelerator, family, folder):
    """Sharded, whole, as a copy that plays, and saved again: always what `from_pretrained` gives."""
    main, folder = accelerator.is_main_process, folder / family
    expected = load_model(random_model(accelerator, tiny(family), folder))
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


def peak(work):
    """The most bytes that work() held at a time, of those that torch's allocator gave out in it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                profile_memory=True) as profile:
        work()
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def memory(accelerator, folder):
    """Of a model of 16 layers, in fp32: its bytes, and the most that this rank holds of them."""
    config = tiny("llama")
    config.num_hidden_layers, config.vocab_size = 16, 100
    random_model(accelerator, config, folder)
    model = load_model(folder, data=False)
    numbers, *parts = dry_run.sizes(model)  # a rank's shards, and a layer, or what is outside of them
    return dict(planned=4 * (numbers / accelerator.num_processes + max(parts)),
                bytes=4 * model.num_parameters(),
                each=peak(lambda: sharding.shard_model(accelerator, load_model(folder), True)),
                one=peak(lambda: sharding.shard_model(
                    accelerator, load_model(folder, data=accelerator.is_main_process), True)))


def run(*arguments):
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                           "--nproc_per_node", "2", __file__, *map(str, arguments)],
                          env=os.environ | {"HF_DEACTIVATE_ASYNC_LOAD": "1"},  # for the profiler
                          capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]


def test_every_rank_gets_the_bits_that_it_would_read(tmp_path):
    run(tmp_path, *FAMILIES)


def test_only_the_rank_that_reads_ever_holds_a_whole_model(tmp_path):
    """The other holds its half and one part of 17 whole, as planned; read by each, both all."""
    run(tmp_path)
    first, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["each"] > first["bytes"] and other["each"] > other["bytes"]
    assert first["one"] > first["bytes"] and other["one"] < 0.6 * other["bytes"]
    assert other["one"] == pytest.approx(other["planned"], rel=0.1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    ours, given = Accelerator(cpu=True), Path(sys.argv[1])
    for name in sys.argv[2:]:
        compare(ours, name, given)
    if not sys.argv[2:]:
        found = memory(ours, given / "model")
        (given / f"{ours.process_index}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    os._exit(0)  # a thread of gloo's may abort a process that takes itself apart
