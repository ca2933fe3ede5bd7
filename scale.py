"""What a model of billions of parameters needs: sharding over GPUs, and checkpoints inside a phase.

Weights, gradients and AdamW's moments are fp32 everywhere; on a GPU the passes compute in bf16.
"""

import errno
import shutil
import time
import warnings
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from settings import Settings, SettingsError, agents_of

# ------------------------------------------------------------------------------------ sharding


def spread(accelerator, model, shard: bool, recompute: bool = False):
    """The fp32 model, ready to train on all ranks: whole on each (DDP), or sharded (FSDP2).

    recompute: gradient checkpointing, which keeps a layer's input and computes the rest again.
    ValueError for weights of less than 32 bits: at a learning rate of 1e-6 they do not move.
    """
    for name, p in model.named_parameters():
        if torch.finfo(p.dtype).bits < 32:
            raise ValueError(f"{name} is {p.dtype}; load the model in float32 to train it")
    if recompute:
        recompute_layers(model)
    device = accelerator.device
    if not shard:
        model = model.to(device)
        if accelerator.num_processes == 1:
            return model
        return DistributedDataParallel(model, [device] if device.type == "cuda" else None)
    if not torch.distributed.is_initialized():  # a single process
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(rank=0, world_size=1, store=store)
    mesh = init_device_mesh(device.type, (accelerator.num_processes,))
    bf16 = accelerator.mixed_precision == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, torch.float32 if bf16 else None)
    # Gathered one at a time, in a pass and back. The outermost too: after a pass without gradients
    # torch would keep its weights gathered, and lose part of their gradient in the next pass.
    for part in [*model.get_decoder().layers, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return model.to(device)  # the buffers, which are not sharded


def recompute_layers(model) -> None:
    """Turns gradient checkpointing on."""
    with warnings.catch_warnings():  # later versions of transformers give the method another name
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": False})


def precision(accelerator, model):
    """The context in which a model of `spread` computes: bf16 where the accelerator says so."""
    return (torch.autocast(accelerator.device.type, enabled=False)  # shards bring their own policy
            if isinstance(model, FSDPModule) else accelerator.autocast())


def dtypes(accelerator, model) -> dict[str, str]:
    """The number formats of a model of `spread`; gradients and moments take that of the weights."""
    weights = str(next(model.parameters()).dtype).removeprefix("torch.")
    compute = "bfloat16" if accelerator.mixed_precision == "bf16" else weights
    return dict(weights=weights, gradients=weights, moments=weights, compute=compute)


def save(accelerator, model, folder: Path) -> None:
    """Writes a model of `spread` as `from_pretrained` reads it; every rank has to call this."""
    weights = get_model_state_dict(  # the main rank has them all, the others nothing
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(folder, state_dict=weights)


# -------------------------------------------------------------------- checkpoints inside a phase


def disk_bytes(s: Settings, numbers: int) -> tuple[int, int]:
    """What a run with a model of so many numbers writes: its agents, and states inside a phase.

    Agents are fp32; a state has weights and two moments, and is there while the next is written.
    """
    rounds = 1 + {"sft": 0, "rft": 1, "dart": 1}.get(s.method, s.iterations)
    return 4 * numbers * len(agents_of(s.method)) * rounds, 2 * 12 * numbers


class Checkpoint:
    """The newest state inside a training phase: weights, moments, random state, position, log.

    folder/step-N holds one file per shard; it appears by renaming, then the one before goes.
    `inputs` identifies the phase and what it started from: a state of anything else is not used.
    """

    def __init__(self, accelerator, folder: Path, inputs: str, minutes: float):
        self.accelerator, self.folder, self.inputs = accelerator, folder, inputs
        self.seconds, self.saved_at, self.resumed_at = 60 * minutes, time.monotonic(), 0

    def due(self) -> bool:
        return time.monotonic() - self.saved_at >= self.seconds

    def save(self, model, optimizer, step: int, events: list[dict]) -> None:
        """Every rank calls this after the same step. events: what the phase has logged so far."""
        path, main = self.folder / f"step-{step}", self.accelerator.is_main_process
        temporary = self.folder / "writing"
        if main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        file, parameters = self._file(model), list(model.parameters())
        if main or isinstance(model, FSDPModule):
            state = dict(
                inputs=self.inputs, ranks=self.accelerator.num_processes, step=step, events=events,
                weights=[_local(p.detach()) for p in parameters],
                moments=[{k: _local(v) for k, v in optimizer.state[p].items()} for p in parameters],
                random=_random_state())
            try:
                torch.save(state, temporary / file)
            except RuntimeError as error:  # which does not say what the disk said
                raise OSError(errno.EIO, f"cannot be written, is the disk full? ({error})",
                              str(temporary / file)) from None
        self.accelerator.wait_for_everyone()
        if main:
            shutil.rmtree(path, ignore_errors=True)  # of other inputs, not used
            temporary.rename(path)
            for old in self._saved():
                if old != path:
                    shutil.rmtree(old)
        self.saved_at = time.monotonic()

    def restore(self, model, optimizer) -> tuple[int, list[dict]]:
        """Puts the newest state back; the steps it had made and their events, or 0 and none."""
        self.accelerator.wait_for_everyone()
        for path in reversed(self._saved()):
            file = path / self._file(model)
            if not file.exists():  # made with shards, or without
                continue
            try:
                state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except (RuntimeError, OSError, ValueError, EOFError, UnpicklingError):
                raise SettingsError(f"{file}: damaged; delete {self.folder} to begin the phase "
                                    "again") from None
            same_ranks = state["ranks"] == self.accelerator.num_processes
            if state["inputs"] != self.inputs or isinstance(model, FSDPModule) and not same_ranks:
                continue
            with torch.no_grad():
                for p, weights, moments in zip(model.parameters(), state["weights"],
                                               state["moments"]):
                    _local(p).copy_(weights)
                    optimizer.state[p] = {name: _like(p, value) for name, value in moments.items()}
            torch.set_rng_state(state["random"][0])
            if len(state["random"]) > 1:
                torch.cuda.set_rng_state(state["random"][1])
            self.resumed_at = state["step"]
            return state["step"], state["events"]
        return 0, []

    def remove(self) -> None:
        if self.accelerator.is_main_process:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _saved(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"), key=lambda path: int(path.name[5:]))

    def _file(self, model) -> str:
        sharded = isinstance(model, FSDPModule)
        return f"shard-{self.accelerator.process_index}.pt" if sharded else "whole.pt"


def _local(tensor):
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(p, value):
    """A saved moment, or step count (), in the form in which AdamW keeps it for parameter p."""
    value = value.to(_local(p).device, copy=True)
    if not isinstance(p, DTensor) or not value.ndim:
        return value
    return DTensor.from_local(value, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())


def _random_state() -> list[torch.Tensor]:
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if torch.cuda.is_available()
                                      else [])
