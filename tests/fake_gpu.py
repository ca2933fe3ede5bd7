"""One rank of several GPUs on tensors without data: what training allocates and waits for.

    PYTHONPATH=. LD_PRELOAD=guard.so python tests/fake_gpu.py MODEL LAYERS RANKS TOKENS SHARE PASS  (0: all layers)

guard.so (of guard.cpp) lets tensors "on cuda" take part in autograd where torch was built without
CUDA. Sizes and dtypes are torch's own; attention is the kernel that torch chooses on an H100
without cuDNN. Two optimiser steps of two passes; trajectories of TOKENS, a SHARE of them in
replies, so many that a rank has PASS in a pass. Prints JSON.
"""

import contextlib
import functools
import json
import sys
import traceback
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from lab import tokens as dpo
from lab.engine import sharding
from lab.program import dry_run

ROOT = Path(__file__).parent.parent
MODELS = {
    "llama2-7b": (LlamaConfig, dict(num_hidden_layers=32, hidden_size=4096, vocab_size=32000,
                                    intermediate_size=11008, num_attention_heads=32)),
    "llama2-13b": (LlamaConfig, dict(num_hidden_layers=40, hidden_size=5120, vocab_size=32000,
                                     intermediate_size=13824, num_attention_heads=40)),
    "qwen3-4b": (Qwen3Config, dict(num_hidden_layers=36, hidden_size=2560, vocab_size=151936,
                                   intermediate_size=9728, num_attention_heads=32, head_dim=128,
                                   num_key_value_heads=8, tie_word_embeddings=True))}


class Stream:
    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: None


def pretend() -> None:
    """Makes torch take this machine for one with GPUs."""
    torch.cuda.current_device, torch.cuda.set_device = lambda: 0, lambda device: None
    torch.cuda.device_count = lambda: 8
    torch.cuda.Stream = torch.cuda.Event = Stream
    torch.cuda.current_stream = torch.accelerator.current_stream = Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    fake_tensor.init_gpu_context = lambda device: None
    FakeTensorMode.avoid_device_init = property(lambda self: True)
    fake_tensor.FakeTensor.tolist = tolist
    F.scaled_dot_product_attention = flash_attention


def flash_attention(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    assert q.dtype == torch.bfloat16 and attn_mask is None
    return torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, is_causal, scale=scale)[0]


def tolist(self):
    Host.waits["tolist"] += 1
    return [[1.0] * self.shape[1]] * self.shape[0]


class Host(TorchDispatchMode):
    """What the host waits for, and what mixes tensors of both devices."""
    waits, mixed = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if function is torch.ops.aten._local_scalar_dense.default:
            self.waits["item"] += leaves[0].device.type == "cuda"
            return 1.0
        result = function(*args, **(kwargs or {}))
        out = next((t for t in tree_leaves(result) if isinstance(t, torch.Tensor)), None)
        devices = {t.device.type for t in leaves}
        if devices == {"cpu"} and out is not None and out.device.type == "cuda":
            self.waits["to the device"] += 1
        elif len(devices) > 1 and out.device.type == "cuda":
            frame = next(f for f in reversed(traceback.extract_stack())
                         if str(ROOT) in f.filename and ".venv" not in f.filename
                         and f.filename != __file__)
            self.mixed[f"{function} {frame.filename}:{frame.lineno}"] += 1
        return result


class Memory(dry_run.Live):
    """Of tensors on the GPU; FSDP2 frees storages by resizing them."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if isinstance(local, torch.Tensor) and local.device.type == "cuda":
                self.add(local.untyped_storage())
        return result

    def __enter__(self):
        memory, self.resize = self, torch.UntypedStorage.resize_

        def resize_(storage, size):
            memory.resize(storage, size)
            if storage._cdata in memory.sizes:
                memory.set(storage._cdata, size)
            return storage
        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()


class Rank:
    """What the program uses of accelerate's Accelerator, on GPUs in bf16."""
    process_index, is_main_process, mixed_precision = 0, True, "bf16"
    device = torch.device("cuda", 0)
    no_sync = staticmethod(lambda model: contextlib.nullcontext())
    backward = staticmethod(lambda loss: loss.backward())
    reduce = staticmethod(lambda tensor: tensor.clone())
    clip_grad_norm_ = staticmethod(torch.nn.utils.clip_grad_norm_)

    def __init__(self, ranks):
        self.num_processes = ranks


def trajectories(count: int, tokens: int, share: float) -> list[dpo.Trajectory]:
    written = int(share * tokens)
    mask = [0] * (tokens - written) + [1] * written
    return [dpo.Trajectory(ids=[n] * tokens, action_mask=mask) for n in range(count)]


def main(name, layers, ranks, tokens, share, tokens_of_pass):
    pretend()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = sharding.init_device_mesh("cuda", (ranks,))
    sharding.init_device_mesh = lambda *_, **__: mesh  # made of real numbers
    dist.broadcast_object_list = lambda *_, **__: None
    accelerator, (kind, sizes) = Rank(ranks), MODELS[name]
    config = kind(**sizes | (dict(num_hidden_layers=layers) if layers else {}))
    per_rank = tokens_of_pass // tokens
    sides = trajectories(per_rank * ranks * 2, tokens, share)
    batch = [dpo.Group(str(n), [a, b], [dpo.Pair("k", 0, 1)], [-10.0] * 2)
             for n, (a, b) in enumerate(zip(sides[::2], sides[1::2]))]
    build = functools.partial(AutoModelForCausalLM.from_config, config,
                              attn_implementation="ragged")
    with FakeTensorMode():
        planned = dry_run.training_memory(build(dtype=torch.bfloat16), sides[:per_rank], ranks, True)
    with FakeTensorMode(), Memory([]) as memory, Host():
        model = sharding.shard_model(accelerator, build(dtype=torch.float32), True, True)
        memory.peak = memory.now
        Host.waits.clear()
        dpo.fit(accelerator, model, [[batch, batch]], dpo.Objective(
            functools.partial(dpo.preference_loss, beta=0.1), dpo.count_pairs), dpo.Optimisation(
                1e-6, 0.0, "constant", 0.0, 1.0, tokens_of_pass), lambda event: None)
    print(json.dumps(dict(peak=memory.peak, planned=sum(planned.values()), parts=planned,
                          mixed=Host.mixed, waits=Host.waits)))


if __name__ == "__main__":
    name, layers, ranks, tokens, share, of_pass = sys.argv[1:]
    main(name, int(layers), int(ranks), int(tokens), float(share), int(of_pass))
