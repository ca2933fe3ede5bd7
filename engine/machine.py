"""The processes and GPUs of a run, the layout of its work, and estimates of GPU memory.

A run has one `Machine`. Estimates, such as `slots_that_fit`, are computed from a model's config.
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
    """The machine: batch sizes, precision and memory"""
    # Maximum number of episodes that a rank runs in parallel; 0 for as many as fit in a GPU's
    # memory, 64 on a CPU with a model below 10 M parameters, 8 on a CPU with a larger one, and 16
    # with an API endpoint [ours]
    slots: Free[Whole] = 0
    # Maximum number of tokens in a forward pass on one rank; 0 for 8,192 on a GPU and 1,024 on a
    # CPU [ours]
    tokens_per_forward: Free[Whole] = 0
    # Run forward passes and episodes in bf16; "auto" does so on a GPU, except with the model tiny
    # [ours]
    bf16: AUTO = "auto"
    # Recompute the activations of each layer in the backward pass (gradient checkpointing), which
    # saves memory and takes a quarter more time; "auto" does so on a GPU if training would not fit
    # in its memory otherwise [ours]
    gradient_checkpointing: Free[AUTO] = "auto"


class Machine:
    """The ranks (processes) of a run, of which this process is one, and the layout of its work."""

    def __init__(self, s: MachineSettings):
        if s.model != "tiny":
            check_torch()
        gpu = torch.cuda.is_available()
        large = gpu and s.model != "tiny"
        self.bf16 = is_on(s.bf16, auto=large)
        self.slow_group = None  # process group with a long timeout, since ranks play for hours
        with rendezvous():
            self.accelerator = accelerator_of(gpu, self.bf16)
            if self.accelerator.num_processes > 1:
                self.slow_group = torch.distributed.new_group(backend="gloo",
                                                              timeout=timedelta(days=7))
        self.device = self.accelerator.device
        self.main = self.accelerator.is_main_process
        self.rank = self.accelerator.process_index
        self.ranks = self.accelerator.num_processes
        self.shard = self.ranks > 1  # with several ranks, FSDP2 shards a model in training [ours]
        self.recompute = s.gradient_checkpointing == "on"
        self.tokens_per_forward = s.tokens_per_forward
        if s.tokens_per_forward == 0:
            self.tokens_per_forward = 8192 if gpu else 1024

    def plan(self, s: MachineSettings, config, parameters: int, keeps_reference: bool,
             group: int = 1) -> None:
        """Sets the number of CPU threads, and turns on gradient checkpointing if memory is short.

        Args:
            s: The settings of the run.
            config, parameters, keeps_reference: The arguments of `training_bytes`.
            group: The number of trajectories in a task's largest group. The group is never split
                into micro-batches, so each rank keeps the activations of its share of the group.

        Raises UsageError if the model cannot be trained in the memory of these GPUs.
        """
        if self.device.type == "cpu" and parameters < SMALL:
            # Threads would wait for each other. One takes 1.6 s where several take 3.6 s.
            torch.set_num_threads(1)
        if self.device.type != "cuda" or s.model == "tiny":
            return
        shards = self.ranks if self.shard else 1
        # A trajectory that exceeds tokens_per_forward has a forward pass of its own.
        tokens = max(self.tokens_per_forward, s.max_tokens)
        problem = check_memory(config, parameters, shards, tokens, keeps_reference)
        if problem:
            raise UsageError(f"--model {s.model}: {problem}")
        tokens = max(tokens, -(-group // self.ranks) * s.max_tokens)
        needed = sum(training_bytes(config, parameters, shards, tokens, False, keeps_reference))
        self.recompute = is_on(s.gradient_checkpointing, auto=needed > FREE * free_memory())

    def wait(self) -> None:
        """Waits until all ranks have called this."""
        self.accelerator.wait_for_everyone()

    def gather(self, items: list) -> list:
        """Returns the items of all ranks in the order of the ranks.

        One rank may take hours longer than another to get here.
        """
        if self.ranks == 1:
            return items
        lists = [None] * self.ranks
        torch.distributed.all_gather_object(lists, items, self.slow_group)
        gathered = []
        for items_of_rank in lists:
            gathered += items_of_rank
        return gathered


@contextmanager
def rendezvous():
    """Handles signals and errors while the ranks wait for each other to start.

    They wait in C++ code, for up to 30 minutes, where no Python signal handler is called. SIGINT
    and SIGTERM therefore end this process at once.

    Raises UsageError if the ranks do not meet, or the environment variables that describe them are
    incomplete.
    """
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.signal(number, signal.SIG_DFL)
                    for number in (signal.SIGINT, signal.SIGTERM)}
    notice = threading.Timer(3, print_rendezvous_address)
    notice.daemon = True
    notice.start()
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if not {"LOCAL_RANK", "WORLD_SIZE"} & {*os.environ}:
            raise
        first, *_ = str(error).splitlines()
        raise UsageError(f"the ranks do not meet: {first}; to run one process, unset LOCAL_RANK, "
                         "RANK and WORLD_SIZE") from error
    finally:
        notice.cancel()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def print_rendezvous_address() -> None:
    rank, ranks, host, port = (os.environ.get(name) for name in (
        "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if ranks not in (None, "1"):
        print(f"rank {rank} of {ranks} waits for {host}:{port}; WORLD_SIZE and RANK come from the "
              "environment", file=sys.stderr, flush=True)


def is_on(setting: str, auto: bool) -> bool:
    """Returns True if a setting is "on", or if it is "auto" and `auto` is true."""
    return auto if setting == "auto" else setting == "on"


def accelerator_of(gpu: bool, bf16: bool) -> Accelerator:
    """Returns an Accelerator, which holds the ranks, the device and the precision of a run.

    Also sets the options of torch and CUDA that a run on a GPU needs.
    """
    # With segments of a fixed size, the allocator would leave gaps.
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # cuDNN plans its attention anew for each shape, which takes 0.1 s or more. Lengths vary, so
    # nearly every forward pass in training and every third decode step has a new shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # NVIDIA's containers turn on TF32, which is less precise than fp32.
    torch.backends.cuda.matmul.allow_tf32 = False
    # Ignore plugins that a default_config.yaml of accelerate turns on.
    for plugin in "DEEPSPEED", "FSDP", "MEGATRON_LM":
        os.environ.pop(f"ACCELERATE_USE_{plugin}", None)
    timeout = InitProcessGroupKwargs(timeout=timedelta(minutes=30))
    return Accelerator(cpu=not gpu, kwargs_handlers=[timeout],
                       mixed_precision="bf16" if bf16 else "no")


# ------------------------------------------------------------------------- what fits on a GPU
# These estimates add up the sizes of tensors. docs/large_models.md compares them with the peak
# memory on an H100.

SMALL = 10_000_000  # parameters; a larger model is slow on a CPU even with a small batch [ours]
FREE = 0.92  # usable fraction of memory; CUDA contexts, NCCL buffers and gaps take the rest
SLOTS = 128  # maximum; up to here, a larger batch hardly makes a decode step slower [ours]
ACTING = 0.5  # fraction of positions whose next token is an action token in some row [ours]


class ModelSizes:
    """The dimensions of a transformers model."""

    def __init__(self, config):
        text = config.get_text_config()
        self.hidden = text.hidden_size
        self.layers = text.num_hidden_layers
        self.vocabulary = text.vocab_size
        self.intermediate = getattr(text, "intermediate_size", None) or 4 * self.hidden
        # The config of a state-space model, such as Mamba, lists no attention heads.
        self.heads = getattr(text, "num_attention_heads", None) or 0
        head = getattr(text, "head_dim", None) or self.hidden // max(1, self.heads)
        self.queries = self.heads * head
        self.keys = (getattr(text, "num_key_value_heads", None) or self.heads) * head

    @property
    def layer(self) -> int:
        """Bytes per token that a layer in bf16 stores for its backward pass.

        These are the inputs and outputs of two norms, four tensors inside a gated MLP, queries and
        keys with their norms and rotations, values, and the output of attention. Some of them share
        memory: peaks on an H100 were 0.9 of the sum.
        """
        total = 16 * self.hidden + 8 * self.intermediate + 13 * self.queries + 11 * self.keys
        return int(0.9 * total)


def training_bytes(
    config,
    parameters: int,
    ranks: int,
    tokens: int,
    recompute: bool,
    keeps_reference: bool = False,
) -> tuple[float, float]:
    """Estimates the memory that training takes on each GPU.

    Args:
        config: The config of the model.
        parameters: The number of its parameters.
        ranks: The number of GPUs that it is sharded over.
        tokens: The number of tokens in a forward pass.
        recompute: Whether gradient checkpointing is on.
        keeps_reference: Whether the reference model, pi_ref, stays in memory during training.

    Returns:
        The bytes of the states, which are weights, gradients and AdamW's two moments in fp32, and
        pi_ref, and the bytes of the activations of a forward pass.
    """
    size = ModelSizes(config)
    states = (20 if keeps_reference else 16) * parameters / ranks
    stream = 2  # bytes per number in the residual stream
    if ranks == 1:  # autocast caches a bf16 copy of the weights, and the residual stream is fp32
        states += 2 * parameters
        stream = 4
    token = stream * size.hidden * size.layers + size.layer
    if not recompute:
        token = size.layer * size.layers
    token += 10 * ACTING * size.vocabulary  # logits in bf16, in fp32, and their gradient
    return states, token * tokens


def check_memory(
    config,
    parameters: int,
    ranks: int,
    tokens: int,
    keeps_reference: bool,
) -> str | None:
    """Returns None if GPUs like this one can train a model and hold its inference copy.

    Otherwise it returns the reason and a remedy. The arguments are those of `training_bytes`.
    """
    memory = torch.cuda.get_device_properties(0).total_memory
    setup = f"{parameters / 1e9:.2f} B parameters on {ranks} x {memory / 1e9:.0f} GB: "
    if 2 * parameters > FREE * memory:
        return (f"{setup}the inference copy takes {2 * parameters / 1e9:.0f} GB on each GPU; use "
                "larger GPUs or a smaller model")
    states, activations = training_bytes(config, parameters, ranks, tokens, True, keeps_reference)
    longest = int((FREE * memory - states) / activations * tokens)
    if longest >= tokens:
        return None
    needs = (f"{setup}on each GPU, weights and optimiser states take {states / 1e9:.0f} GB and a "
             f"forward pass takes {activations / 1e9:.0f} GB; ")
    if longest >= 1024:
        return (f"{needs}lower --tokens-per-forward, and --max-tokens if it is larger, to "
                f"{longest // 512 * 512}")
    return f"{needs}use more or larger GPUs, or a smaller model"


def free_memory() -> int:
    """Returns the number of free bytes on this process's GPU."""
    free, _ = torch.cuda.mem_get_info()
    return free


def slots_that_fit(
    config,
    free: float,
    tokens: int,
    bf16: bool = True,
    prefill_tokens: int = 4096,
) -> int:
    """Returns the number of episodes that a GPU can run in parallel, once the model is loaded.

    Args:
        config: The config of the model.
        free: The number of free bytes on the GPU.
        tokens: The maximum number of tokens in a conversation. The KV cache is padded, so every row
            takes the memory of the longest one.
        bf16: Whether the model runs in bf16. Otherwise it runs in fp32.
        prefill_tokens: The number of tokens in a prefill pass, over all conversations.
    """
    size = ModelSizes(config)
    number = 2 if bf16 else 4  # bytes per number
    # A prefill needs the activations of one layer, and an integer mask over all cache slots.
    layer = number * (6 * size.hidden + 3 * size.intermediate)
    prefill = prefill_tokens * (layer + 12 * tokens)
    # Each row needs keys and values of all layers, and the logits that a token is sampled from.
    row = number * 2 * size.layers * size.keys * tokens + 32 * size.vocabulary
    return max(1, min(SLOTS, int((FREE * free - prefill) / row)))


def fits_in_fp32(config, parameters: int, free: float, tokens: int) -> bool:
    """Returns True if a GPU has memory for the self-check, in fp32, with sequences of `tokens`."""
    # CUDA has no fused attention in fp32, so the attention scores of all heads of three sequences
    # are in memory, in three copies.
    scores = 3 * 3 * ModelSizes(config).heads * tokens ** 2 * 4
    return 4 * parameters + scores < FREE * free


def check_torch() -> None:
    """Raises UsageError if this torch cannot use the machine's GPUs.

    A run would otherwise train on the CPU for weeks without any message. An empty
    CUDA_VISIBLE_DEVICES selects the CPU on purpose.
    """
    has_gpu = Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()
    wants_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    if has_gpu and wants_gpu and not torch.cuda.is_available():
        raise UsageError(f"torch {torch.__version__} cannot use this machine's GPUs; install torch "
                         "for them (pytorch.org/get-started) or fix their driver, or set "
                         "CUDA_VISIBLE_DEVICES= to train on the CPU")
