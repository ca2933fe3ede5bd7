"""The machine: its processes and cards, how work is laid out on them, and what fits them.

A run has one `Machine`. What `slots_that_fit` and others ask is arithmetic of a model's config.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from common.settings import Free, Whole

AUTO = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class MachineSettings:
    """How the work is laid out on the machine"""
    # Episodes that are played side by side, at most; 0 is what fits a GPU's memory, on a CPU 64 of
    # a small model, else 8 [ours]
    slots: Free[Whole] = 0
    # Tokens of a pass on one rank; 0 is 8,192 on a GPU, else 1,024 [ours]
    tokens_per_forward: Free[Whole] = 0
    # Whether passes and episodes are in bf16; auto is on a GPU, except for tiny [ours]
    bf16: AUTO = "auto"
    # Whether a model that trains is split over the ranks (FSDP2); auto is if there are several
    # [ours]
    shard: Free[AUTO] = "auto"
    # Whether the backward pass computes layers again, which saves memory; auto is on a GPU, except
    # for tiny [ours]
    gradient_checkpointing: Free[AUTO] = "auto"


class Machine:
    """The processes of a run, of which this is one, and how the settings lay out its work."""

    def __init__(self, s: MachineSettings):
        gpu = torch.cuda.is_available()
        large = gpu and s.model != "tiny"
        self.bf16 = is_on(s.bf16, auto=large)
        self.accelerator = accelerator_of(gpu, self.bf16)
        self.device = self.accelerator.device
        self.main = self.accelerator.is_main_process
        self.rank = self.accelerator.process_index
        self.ranks = self.accelerator.num_processes
        self.shard = self.ranks > 1 and is_on(s.shard, auto=True)
        self.recompute = is_on(s.gradient_checkpointing, auto=large)
        self.tokens_per_forward = s.tokens_per_forward
        if s.tokens_per_forward == 0:
            self.tokens_per_forward = 8192 if gpu else 1024
        self.patient = None  # a group of ranks that wait where one plays for hours longer
        if self.ranks > 1:
            self.patient = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=7))

    def wait(self) -> None:
        """Waits for all ranks."""
        self.accelerator.wait_for_everyone()

    def gather(self, things: list) -> list:
        """The things of all ranks, which may take hours longer on one than on another."""
        if self.ranks == 1:
            return things
        of_ranks = [None] * self.ranks
        torch.distributed.all_gather_object(of_ranks, things, self.patient)
        gathered = []
        for of_rank in of_ranks:
            gathered += of_rank
        return gathered


def is_on(setting: str, auto: bool) -> bool:
    """What on, off or auto means."""
    return auto if setting == "auto" else setting == "on"


def accelerator_of(gpu: bool, bf16: bool) -> Accelerator:
    """accelerate's, which knows ranks, device and precision; and what a GPU needs beside it."""
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # blocks of fixed size would leave gaps
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # cuDNN would plan its attention for each shape that it has not met, 0.1 s and more. Lengths
    # vary, and nearly every training pass and every third token written have a new shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # What is to be fp32 is not TF32, which containers of NVIDIA's switch on.
    torch.backends.cuda.matmul.allow_tf32 = False
    timeout = InitProcessGroupKwargs(timeout=timedelta(minutes=30))
    return Accelerator(cpu=not gpu, kwargs_handlers=[timeout],
                       mixed_precision="bf16" if bf16 else "no")


# -------------------------------------------------------------------------- what fits a card

FREE = 0.92  # of a card's memory: contexts, NCCL's buffers and the allocator's gaps take the rest
SLOTS = 128  # at most; up to there a pass that decodes hardly takes longer with more rows [ours]


def free_memory() -> int:
    """The bytes of this process's card that nothing holds yet."""
    free, _ = torch.cuda.mem_get_info()
    return free


def slots_that_fit(config, free: float, tokens: int, bf16: bool = True) -> int:
    """How many episodes a card can play side by side.

    Args:
        config: That of the model.
        free: Bytes of the card that nothing holds yet.
        tokens: Of the longest conversation. Rows are padded, so that each may become as long.
        bf16: Whether the model plays in bf16, else in fp32.
    """
    size_of_a_number = 2 if bf16 else 4
    text = config.get_text_config()
    queries = heads_of(config)
    heads = getattr(text, "num_key_value_heads", None) or queries
    size = getattr(text, "head_dim", None) or text.hidden_size // max(1, queries)
    inside = getattr(text, "intermediate_size", None) or 4 * text.hidden_size

    # A token takes keys and values in all layers, and the inside of the layer that reads it.
    keys_and_values = 2 * text.num_hidden_layers * heads * size
    layer = 6 * text.hidden_size + 3 * inside
    each = size_of_a_number * (keys_and_values + layer) * tokens
    return max(1, min(SLOTS, int(FREE * free / each)))


def fits_in_fp32(config, parameters: int, free: float, tokens: int) -> bool:
    """Whether a card has room for the trial of a model with texts of so many tokens."""
    # Where CUDA has no fused attention, as in fp32, the scores of all heads are there three times.
    scores = 3 * 2 * heads_of(config) * tokens ** 2 * 4
    return 4 * parameters + scores < FREE * free


def heads_of(config) -> int:
    """How many heads attend in a layer; 0 in a state-space model, such as Mamba."""
    return getattr(config.get_text_config(), "num_attention_heads", None) or 0
