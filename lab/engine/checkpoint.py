"""Checkpoints inside a training phase, from which one that was stopped goes on to the same bits."""

import errno
import os
import shutil
import time
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lab.engine import ranks

SHARE = 0.05  # of a phase's time may go into writing states [ours]


class Damaged(Exception):
    """A state that cannot be read; the text is one line, with the remedy."""


class Checkpoint:
    """The newest state inside a training phase: weights, moments, random state, position, log.

    folder/step-N holds one file per shard and appears by renaming; then the one before goes.
    inputs: identifies the phase and what it started from; a state of other inputs is not used.
    """

    def __init__(self, accelerator, folder: Path, inputs: str, minutes: float):
        self.accelerator, self.folder, self.inputs = accelerator, folder, inputs
        self.seconds, self.saved_at, self.resumed_at = 60 * minutes, time.monotonic(), 0
        self.took = 0.0  # seconds that writing the newest took

    def due(self) -> bool:
        """After the minutes given, or as many more as keep writing a SHARE of the time."""
        least = self.took / SHARE if self.seconds else 0
        return time.monotonic() - self.saved_at >= max(self.seconds, least)

    def save(self, model, optimizer, step: int, events: list[dict]) -> None:
        """Every rank calls this after the same step. events: what the phase has logged so far."""
        path, temporary = self.folder / f"step-{step}", self.folder / "writing"
        main, started = self.accelerator.is_main_process, time.monotonic()
        if main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        if main or isinstance(model, FSDPModule):
            file, parameters = temporary / self._file(model), list(model.parameters())
            states = [optimizer.state.get(p, {}) for p in parameters]
            cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
            state = dict(
                inputs=self.inputs, ranks=self.accelerator.num_processes, step=step, events=events,
                weights=[_local(p.detach()) for p in parameters],
                moments=[{k: _local(v) for k, v in state.items()} for state in states],
                random=[torch.get_rng_state(), *cuda])
            try:
                torch.save(state, file)
            except RuntimeError as error:  # which does not say what the disk said
                raise OSError(errno.EIO, f"cannot be written, is the disk full? ({error})",
                              str(file)) from None
            _force(file)
        self.accelerator.wait_for_everyone()
        if main:
            shutil.rmtree(path, ignore_errors=True)  # of other inputs, not used
            _force(temporary)
            temporary.rename(path)
            _force(self.folder)
            for old in set(self._saved()) - {path}:
                shutil.rmtree(old)
        self.saved_at = time.monotonic()
        self.took = self.saved_at - started

    def restore(self, model, optimizer) -> tuple[int, list[dict]]:
        """Puts the newest state back; the steps it had made and their events, or 0 and none."""
        self.accelerator.wait_for_everyone()
        name = self._file(model)  # others were made with shards, or without
        for path in ranks.on_main(self.accelerator, lambda: [
                path for path in reversed(self._saved()) if (path / name).exists()]):
            file = path / name
            appear(file)
            try:
                state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except (RuntimeError, OSError, ValueError, EOFError, UnpicklingError):
                raise Damaged(f"{file}: damaged; delete {self.folder} to begin the phase "
                              "again") from None
            same_ranks = state["ranks"] == self.accelerator.num_processes
            if state["inputs"] != self.inputs or isinstance(model, FSDPModule) and not same_ranks:
                continue
            for p, weights, moments in zip(model.parameters(), state["weights"], state["moments"]):
                _local(p.detach()).copy_(weights)
                if moments:  # there are none before the first update
                    optimizer.state[p] = {k: _like(p, value) for k, value in moments.items()}
            torch.set_rng_state(state["random"][0])
            if len(state["random"]) > 1:
                torch.cuda.set_rng_state(state["random"][1])
            self.resumed_at = state["step"]
            return state["step"], state["events"]
        return 0, []

    def _saved(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"), key=lambda path: int(path.name[5:]))

    def _file(self, model) -> str:
        sharded = isinstance(model, FSDPModule)
        return f"shard-{self.accelerator.process_index}.pt" if sharded else "whole.pt"


def appear(path: Path, seconds: int = 120) -> None:
    """Waits for what another rank has written: a network's folder says for up to a minute that
    there is no file which was asked for too early (NFS's acdirmax)."""
    for _ in range(seconds):
        if path.exists():
            return
        time.sleep(1)
    raise OSError(errno.ENOENT, "written by another rank and not seen by this one; give an --out "
                  "on a disk that all machines share", str(path))


def _force(path: Path) -> None:
    """Forces a file, or the names in a folder, to the disk. OSError names it."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(number)


def _local(tensor):
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(p, value):
    """A saved moment, or step count (), in the form in which AdamW keeps it for parameter p."""
    value = value.to(_local(p).device, copy=True)
    if not isinstance(p, DTensor) or not value.ndim:
        return value
    return DTensor.from_local(value, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
