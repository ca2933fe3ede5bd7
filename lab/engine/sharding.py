"""A model of billions of parameters on several GPUs, each of which holds a part of it.

Weights, gradients and AdamW's moments are fp32 everywhere; on a GPU the passes compute in bf16.
"""

import os
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lab.engine.prepacked import prepack

# The main rank gets all tensors, in host memory, the others nothing.
WHOLE = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


def shard_model(accelerator, model, shard: bool, recompute: bool = False):
    """The fp32 model, ready to train on all ranks: whole on each (DDP), or sharded (FSDP2).

    model: in host memory on the main rank, whose numbers all ranks get; the others' needs no data.
    recompute: gradient checkpointing. ValueError for 16 bits: at a rate of 1e-6 they do not move.
    """
    for name, p in model.named_parameters():
        if torch.finfo(p.dtype).bits < 32:
            raise ValueError(f"{name} is {p.dtype}; load the model in float32 to train it")
    no_dropout(model)
    if recompute:
        recompute_layers(model)
    device = accelerator.device
    if not shard:
        hand_out(model, device)
        if accelerator.num_processes == 1:
            return model
        return DistributedDataParallel(model, [device] if device.type == "cuda" else None)
    if not torch.distributed.is_initialized():  # a single process
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(rank=0, world_size=1, store=store)
    # Sharded inside a machine and replicated between machines, whose network is slower.
    n = accelerator.num_processes
    local = int(os.environ.get("LOCAL_WORLD_SIZE", n))
    mesh = (init_device_mesh(device.type, (n // local, local), mesh_dim_names=("between", "inside"))
            if 1 < local < n else init_device_mesh(device.type, (n,)))
    bf16 = accelerator.mixed_precision == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, torch.float32 if bf16 else None)
    # Gathered one at a time, in a pass and back. The outermost too: after a pass without gradients
    # torch would keep its weights gathered, and lose part of their gradient in the next pass.
    for part in [*layers_of(model), model]:
        hand_out(part, device)  # no rank but the main one ever holds more than one part whole
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return model


def hand_out(model, device) -> None:
    """Puts the main rank's numbers into each rank's model, on the device: also those of buffers
    that are not saved, which torch's state dicts leave out. All ranks must call it."""
    def receive(tensor):
        if isinstance(tensor, DTensor):  # of a layer that is sharded already
            return tensor
        whole = (torch.empty_like(tensor, device=device) if tensor.is_meta else
                 tensor.detach().to(device))
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(whole, src=0)
        return whole

    first = [ties(model)]  # without its data, a file that holds a tied weight twice is not tied
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(first, src=0)
    replace_tensors(model, first[0], receive)


def replace_tensors(model, first: list[int], make) -> None:
    """Puts make(tensor) in the place of each of `tensors`; tied ones, as `ties` says, share it."""
    made = []
    for n, (held, name, tensor) in enumerate(tensors(model)):
        new = made[first[n]] if first[n] < n else make(tensor)
        if isinstance(tensor, torch.nn.Parameter) and not isinstance(new, torch.nn.Parameter):
            new = torch.nn.Parameter(new, tensor.requires_grad)
        held[name] = new
        made.append(new)


def ties(model) -> list[int]:
    """For each of `tensors`, the first one that is the same: itself, or what it is tied to."""
    numbers = [id(tensor) for *_, tensor in tensors(model)]
    return [numbers.index(number) for number in numbers]


def tensors(model) -> list[tuple[dict, str, torch.Tensor]]:
    """(where it is held, its name there, itself): parameters and buffers, also those not saved."""
    return [(held, name, tensor) for module in model.modules()
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items() if tensor is not None]


def layers_of(model) -> torch.nn.ModuleList:
    """A model's layers; families keep them under different names."""
    return next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList)
                and len(module) == model.config.num_hidden_layers)


def no_dropout(model) -> None:
    """Sets every rate at which the model's code drops or jitters numbers to 0, not its config's:
    with dropout the first DPO loss is not ln 2. Training mode stays on for gradient checkpointing.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):  # attention_dropout, router_jitter_noise
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


def recompute_layers(model) -> None:
    """Turns gradient checkpointing on."""
    with warnings.catch_warnings():  # transformers will give the method another name
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": False})


def precision(accelerator, model):
    """The context in which a model of `shard_model` computes: bf16 if the accelerator says so."""
    return (torch.autocast(accelerator.device.type, enabled=False)  # shards bring their own policy
            if isinstance(model, FSDPModule) else accelerator.autocast())


def last_reduces(accelerator, model, last: bool):
    """The context of a pass of a step. In the last one DDP all-reduces, as FSDP does between
    machines; inside, FSDP reduce-scatters after every pass, so that no rank holds whole gradients.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)
    return nullcontext() if last else accelerator.no_sync(model)


def dtypes(accelerator, model) -> dict[str, str]:
    """The number formats of a model of `shard_model`; gradients and moments take the weights'."""
    weights = str(next(model.parameters()).dtype).removeprefix("torch.")
    compute = "bfloat16" if accelerator.mixed_precision == "bf16" else weights
    return dict(weights=weights, gradients=weights, moments=weights, compute=compute)


def clip_grad_norm(accelerator, model, largest: float) -> float:
    """Scales the gradient down to the norm `largest`; the norm that it had."""
    norm = accelerator.clip_grad_norm_(model.parameters(), largest)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def save(accelerator, model, folder: Path) -> dict:
    """Writes a model of `shard_model` as `from_pretrained` reads it; its weights, on the main rank.
    Every rank has to call it."""
    weights = states.get_model_state_dict(model, options=WHOLE)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(folder, state_dict=weights)
    return weights


@torch.no_grad()
def whole(accelerator, model, make):
    """A model of `shard_model` as it plays, whole on each rank; every rank has to call it. The live
    one where that is whole and plays in its own format, else a copy into make(), a model without
    data (on meta) in the format it plays in.
    """
    live = accelerator.unwrap_model(model)
    if not isinstance(model, FSDPModule) and accelerator.mixed_precision != "bf16":
        return live
    copy = make()
    pairs = zip(tensors(copy), tensors(live), strict=True)
    same = {empty: tensor for (*_, empty), (*_, tensor) in pairs}

    def gather(empty):  # one at a time
        tensor = same[empty]
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full.to(accelerator.device, empty.dtype, copy=True)

    replace_tensors(copy, ties(live), gather)
    prepack(copy)
    return copy


def save_moments(accelerator, model, optimizer, file: Path) -> None:
    """Writes AdamW's moments, whole; every rank has to call it."""
    moments = states.get_optimizer_state_dict(model, optimizer, options=WHOLE)
    if accelerator.is_main_process:
        torch.save(moments, file)


def load_moments(model, optimizer, file: Path) -> None:
    """Puts the moments of `save_moments` back, whatever the number of ranks was."""
    moments = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    states.set_optimizer_state_dict(model, optimizer, moments, options=states.StateDictOptions(
        full_state_dict=True))
