"""The machine: its processes and cards, how work is laid out on them, and what fits them.

A run has one `Machine`. What `slots_that_fit` and others ask is arithmetic of a model's config.
"""

import os
import signal
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from common.settings import Free, UsageError, Whole

AUTO = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class MachineSettings:
    """How the work is laid out on the machine"""
    # Episodes that are played side by side, at most; 0 is what fits a GPU's memory, on a CPU 64 of
    # a small model, else 8; at an endpoint 16 [ours]
    slots: Free[Whole] = 0
    # Tokens of a pass on one rank; 0 is 8,192 on a GPU, else 1,024 [ours]
    tokens_per_forward: Free[Whole] = 0
    # Whether passes and episodes are in bf16; auto is on a GPU, except for tiny [ours]
    bf16: AUTO = "auto"
    # Whether the backward pass computes layers again, which saves memory and takes a quarter more
    # time; auto is on a GPU where memory asks for it [ours]
    gradient_checkpointing: Free[AUTO] = "auto"


class Machine:
    """The processes of a run, of which this is one, and how the settings lay out its work."""

    def __init__(self, s: MachineSettings):
        if s.model != "tiny":
            check_torch()
        gpu = torch.cuda.is_available()
        large = gpu and s.model != "tiny"
        self.bf16 = is_on(s.bf16, auto=large)
        self.patient = None  # a group of ranks that wait where one plays for hours longer
        with rendezvous():
            self.accelerator = accelerator_of(gpu, self.bf16)
            if self.accelerator.num_processes > 1:
                self.patient = torch.distributed.new_group(backend="gloo",
                                                           timeout=timedelta(days=7))
        self.device = self.accelerator.device
        self.main = self.accelerator.is_main_process
        self.rank = self.accelerator.process_index
        self.ranks = self.accelerator.num_processes
        self.shard = self.ranks > 1  # a model in training, by FSDP2 [ours]
        self.recompute = s.gradient_checkpointing == "on"
        self.tokens_per_forward = s.tokens_per_forward
        if s.tokens_per_forward == 0:
            self.tokens_per_forward = 8192 if gpu else 1024

    def plan(self, s: MachineSettings, config, parameters: int, beside: bool) -> None:
        """Decides whether layers are recomputed, and how many cores work; Refused where no card
        holds the model's training. The arguments are those of `training_bytes`."""
        if self.device.type == "cpu" and parameters < SMALL:
            torch.set_num_threads(1)  # threads would wait for each other: 3.6 s against 1.6 s
        if self.device.type != "cuda" or s.model == "tiny":
            return
        parts = self.ranks if self.shard else 1
        tokens = max(self.tokens_per_forward, s.max_tokens)  # of a pass: a long text is one alone
        wrong = check_memory(config, parameters, parts, tokens, beside)
        if wrong:
            raise UsageError(f"--model {s.model}: {wrong}")
        takes = sum(training_bytes(config, parameters, parts, tokens, False, beside))
        self.recompute = is_on(s.gradient_checkpointing, auto=takes > FREE * free_memory())

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


@contextmanager
def rendezvous():
    """The time in which ranks wait for each other to start, which they do in C++ and for up to 30
    minutes. SIGINT and SIGTERM end this process at once: no handler of Python's would be called.

    Raises:
        Refused: The ranks do not meet, or the environment does not say who they are.
    """
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.signal(number, signal.SIG_DFL)
                    for number in (signal.SIGINT, signal.SIGTERM)}
    notice = threading.Timer(3, print_what_a_rank_waits_for)
    notice.daemon = True
    notice.start()
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if not {"LOCAL_RANK", "WORLD_SIZE"} & {*os.environ}:
            raise
        first, *_ = str(error).splitlines()
        raise UsageError(f"the ranks do not meet: {first}; to run one process, unset LOCAL_RANK, RANK "
                      "and WORLD_SIZE") from error
    finally:
        notice.cancel()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def print_what_a_rank_waits_for() -> None:
    rank, ranks, host, port = (os.environ.get(name) for name in (
        "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if ranks not in (None, "1"):
        print(f"rank {rank} of {ranks} waits for {host}:{port}; WORLD_SIZE and RANK come from the "
              "environment", file=sys.stderr, flush=True)


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
    for plugin in "DEEPSPEED", "FSDP", "MEGATRON_LM":  # of a default_config.yaml of accelerate
        os.environ.pop(f"ACCELERATE_USE_{plugin}", None)
    timeout = InitProcessGroupKwargs(timeout=timedelta(minutes=30))
    return Accelerator(cpu=not gpu, kwargs_handlers=[timeout],
                       mixed_precision="bf16" if bf16 else "no")


# ------------------------------------------------------------------------- what fits a card
# Counted, and compared with an H100's peaks in docs/large_models.md.

SMALL = 10_000_000  # parameters; from there on a pass of a few rows takes a CPU long [ours]
FREE = 0.92  # of a card's memory: contexts, NCCL's buffers and the allocator's gaps take the rest
SLOTS = 128  # at most; up to there a pass that decodes hardly takes longer with more rows [ours]
ACTING = 0.5  # of a pass's tokens, those whose next token is an action of some row [ours]


class Sizes:
    """The sizes of a model of transformers, in numbers."""

    def __init__(self, config):
        text = config.get_text_config()
        self.hidden = text.hidden_size
        self.layers = text.num_hidden_layers
        self.words = text.vocab_size
        self.inside = getattr(text, "intermediate_size", None) or 4 * self.hidden
        # Of a state-space model, such as Mamba, no heads are known.
        self.heads = getattr(text, "num_attention_heads", None) or 0
        size = getattr(text, "head_dim", None) or self.hidden // max(1, self.heads)
        self.queries = self.heads * size
        self.keys = (getattr(text, "num_key_value_heads", None) or self.heads) * size

    @property
    def layer(self) -> int:
        """Bytes that a layer in bf16 keeps of a token for its backward pass: two norms and what
        they give, four of a gated network's inside, queries and keys, their rotations and norms,
        values, what attention gives. Some are one tensor: an H100's peaks are 0.9 of the sum."""
        whole = 16 * self.hidden + 8 * self.inside + 13 * self.queries + 11 * self.keys
        return int(0.9 * whole)


def training_bytes(
    config,
    parameters: int,
    ranks: int,
    tokens: int,
    recompute: bool,
    beside: bool = False,
) -> tuple[float, float]:
    """What a model's training takes on each card, in bytes.

    Args:
        config: That of the model.
        parameters: How many it has.
        ranks: Over how many cards it is in parts.
        tokens: Of a pass.
        recompute: Whether layers run again in the backward pass.
        beside: Whether pi_ref stays beside what is trained.

    Returns:
        What stays: weights, gradients and AdamW's two moments in fp32, and pi_ref; and a pass.
    """
    size = Sizes(config)
    states = (20 if beside else 16) * parameters / ranks
    stream = 2
    if ranks == 1:  # autocast holds a bf16 copy, and layers give each other fp32
        states += 2 * parameters
        stream = 4
    token = stream * size.hidden * size.layers + size.layer
    if not recompute:
        token = size.layer * size.layers
    token += 10 * ACTING * size.words  # logits in bf16, in fp32, and their gradient
    return states, token * tokens


def check_memory(config, parameters: int, ranks: int, tokens: int, beside: bool) -> str | None:
    """Why cards like this process's cannot train a model and play it, and what can; or None. The
    arguments are those of `training_bytes`."""
    card = torch.cuda.get_device_properties(0).total_memory
    said = f"{parameters / 1e9:.2f} B parameters on {ranks} x {card / 1e9:.0f} GB: "
    if 2 * parameters > FREE * card:
        return (f"{said}the copy that plays takes {2 * parameters / 1e9:.0f} GB on each; give "
                "larger cards, or a smaller model")
    states, a_pass = training_bytes(config, parameters, ranks, tokens, True, beside)
    longest = int((FREE * card - states) / a_pass * tokens)
    if longest >= tokens:
        return None
    takes = f"{said}states take {states / 1e9:.0f} GB on each, a pass {a_pass / 1e9:.0f}; "
    if longest >= 1024:
        return (f"{takes}lower --tokens-per-forward, and --max-tokens where it is more, to "
                f"{longest // 512 * 512}")
    return f"{takes}give more or larger cards, or a smaller model"


def free_memory() -> int:
    """The bytes of this process's card that nothing holds yet."""
    free, _ = torch.cuda.mem_get_info()
    return free


def slots_that_fit(config, free: float, tokens: int, bf16: bool = True, read: int = 4096) -> int:
    """How many episodes a card can play side by side, with the model on it.

    Args:
        config: That of the model.
        free: Bytes of the card that nothing holds yet.
        tokens: Of the longest conversation. Rows are padded, so that each may become as long.
        bf16: Whether the model plays in bf16, else in fp32.
        read: Tokens that are read at a time, of all conversations.
    """
    size = Sizes(config)
    number = 2 if bf16 else 4
    # What reads: the inside of a layer, and a mask over all columns, which is made of integers.
    reading = read * (number * (6 * size.hidden + 3 * size.inside) + 12 * tokens)
    # Of each row keys and values in all layers, and what is drawn from.
    row = number * 2 * size.layers * size.keys * tokens + 32 * size.words
    return max(1, min(SLOTS, int((FREE * free - reading) / row)))


def fits_in_fp32(config, parameters: int, free: float, tokens: int) -> bool:
    """Whether a card has room for the trial of a model with texts of so many tokens."""
    # Where CUDA has no fused attention, as in fp32, the scores of all heads are there three times.
    scores = 3 * 3 * Sizes(config).heads * tokens ** 2 * 4
    return 4 * parameters + scores < FREE * free


def check_torch() -> None:
    """Refused where this torch cannot use the machine's GPUs: a run would take weeks on the CPU
    without a word. An empty CUDA_VISIBLE_DEVICES asks for the CPU."""
    there = Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()
    asked_for = os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    if there and asked_for and not torch.cuda.is_available():
        raise UsageError(f"torch {torch.__version__} cannot use this machine's GPUs; install torch "
                      "for them (pytorch.org/get-started) or mend their driver, or set "
                      "CUDA_VISIBLE_DEVICES= to train on the CPU")
