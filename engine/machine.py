"""The processes (ranks) and the device of a run, and estimates of GPU memory."""

import os
import signal
import subprocess
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
from engine.chat import first_line

AUTO = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class MachineSettings:
    """The machine: batch sizes, precision and memory"""
    # Maximum number of parallel episodes on each rank; 0 means as many as fit in memory on a GPU,
    # 64 on a CPU with a model below 10 M parameters, 8 on a CPU with a larger model, and 16 with an
    # API endpoint [ours]
    slots: Free[Whole] = 0
    # Maximum number of tokens in a forward pass on each rank; 0 means 8,192 on a GPU and 1,024 on a
    # CPU [ours]
    tokens_per_forward: Free[Whole] = 0
    # Run training and episodes in bf16; "auto" turns bf16 on if there is a GPU, except with --model
    # tiny [ours]
    bf16: AUTO = "auto"
    # Recompute the activations of each layer in the backward pass (gradient checkpointing), which
    # saves memory and takes a quarter more time; "auto" turns it on if training does not fit in the
    # memory of the GPU without it [ours]
    gradient_checkpointing: Free[AUTO] = "auto"


class Machine:
    """The device and the rank of this process, and the settings that depend on the hardware.

    On a machine with GPUs, each rank uses one GPU.
    """

    def __init__(self, s: MachineSettings):
        if s.model != "tiny":
            check_torch()
        gpu = torch.cuda.is_available()
        self.bf16 = is_on(s.bf16, auto=gpu and s.model != "tiny")
        # A process group for `gather`. Its timeout is long, because one rank may run episodes for
        # hours longer than another.
        self.slow_group = None
        with rendezvous():
            self.accelerator = accelerator_of(gpu, self.bf16)
            if self.accelerator.num_processes > 1:
                self.slow_group = torch.distributed.new_group(backend="gloo",
                                                              timeout=timedelta(days=7))
        self.device = self.accelerator.device
        self.main = self.accelerator.is_main_process
        self.rank = self.accelerator.process_index
        self.ranks = self.accelerator.num_processes
        self.checkpointing = s.gradient_checkpointing
        # is_short(group_tokens) is True if the memory of the GPU is too small to train without
        # gradient checkpointing. `plan` replaces this function on GPUs, except with --model tiny.
        self.is_short = lambda group_tokens: False
        self.tokens_per_forward = s.tokens_per_forward or (8192 if gpu else 1024)

    def plan(self, s: MachineSettings, config, parameters: int, keeps_reference: bool) -> None:
        """Sets the CPU thread count and `is_short`, and checks that the GPUs can train the model.

        Raises UsageError if the model is too large.
        """
        if self.device.type == "cpu" and parameters < SMALL:
            # With such a small model, the same work takes 1.6 s with one thread and 3.6 s with
            # several, because the threads mostly wait for each other.
            torch.set_num_threads(1)
        if self.device.type != "cuda" or s.model == "tiny":
            return
        # A trajectory longer than tokens_per_forward gets a separate forward pass, so a forward
        # pass may have up to max_tokens tokens.
        tokens = max(self.tokens_per_forward, s.max_tokens)
        problem = check_memory(config, parameters, self.ranks, tokens, keeps_reference)
        if problem:
            raise UsageError(f"--model {s.model}: {problem}")
        memory = USABLE * free_memory()

        def is_short(group_tokens: int) -> bool:
            states, activations = training_bytes(config, parameters, self.ranks,
                                                 max(tokens, group_tokens), False, keeps_reference)
            return states + activations > memory

        self.is_short = is_short

    def recomputes(self, groups: list) -> bool:
        """Returns True if training on these groups needs gradient checkpointing.

        A `dpo.Group` is never split into micro-batches, so each rank has to store the activations
        of its share of the largest group.
        """
        tokens = 0
        for group in groups:
            of_rank = -(-len(group.trajectories) // self.ranks)
            tokens = max(tokens, of_rank * max(len(t.ids) for t in group.trajectories))
        return is_on(self.checkpointing, auto=self.is_short(tokens))

    def wait(self) -> None:
        self.accelerator.wait_for_everyone()

    def gather(self, items: list) -> list:
        """Concatenates the lists of all ranks, in the order of the ranks.

        Every rank has to call this method, and waits for the others.
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
    """Handles signals and errors while the ranks connect to each other.

    torch may wait up to 30 minutes for all ranks, in C++ code, where Python's signal handlers do
    not run. Therefore SIGINT and SIGTERM get their default handlers, which end the process at once.
    After 3 seconds, the process prints the address that it is waiting for. Raises UsageError if the
    ranks cannot connect.
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
        raise UsageError(f"the ranks do not meet: {first_line(error)}; to run one process, unset "
                         "LOCAL_RANK, RANK and WORLD_SIZE") from error
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
    return auto if setting == "auto" else setting == "on"


def accelerator_of(gpu: bool, bf16: bool) -> Accelerator:
    """Creates the Accelerator of the run, and sets global options of torch and CUDA."""
    # Expandable segments reduce memory fragmentation in the CUDA allocator.
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # Turn off the attention kernels of cuDNN. They need 0.1 s or more to prepare for a new input
    # shape. New shapes occur in nearly every forward pass in training, and in every third decode
    # step.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Turn off TF32, which NVIDIA's containers turn on. TF32 is less precise than fp32.
    torch.backends.cuda.matmul.allow_tf32 = False
    # Ignore plugins that the user's accelerate config (default_config.yaml) turns on.
    for plugin in "DEEPSPEED", "FSDP", "MEGATRON_LM":
        os.environ.pop(f"ACCELERATE_USE_{plugin}", None)
    timeout = InitProcessGroupKwargs(timeout=timedelta(minutes=30))
    return Accelerator(cpu=not gpu, kwargs_handlers=[timeout],
                       mixed_precision="bf16" if bf16 else "no")


# ------------------------------------------------------------------------- what fits on a GPU
# These estimates are sums of tensor sizes. docs/large_models.md compares the estimates with the
# peak memory that was measured on an H100.

# A model with fewer parameters than SMALL counts as small. Larger models are slow on a CPU, even
# with a small batch [ours].
SMALL = 10_000_000
# The fraction of GPU memory that tensors can use. The remaining memory is needed for the CUDA
# context, NCCL buffers and fragmentation.
USABLE = 0.92
# The maximum number of parallel episodes on a GPU. Up to this batch size, a larger batch hardly
# makes a decode step slower [ours].
SLOTS = 128
# The assumed fraction of positions that need logits. A position needs logits if the next token is
# an action token in at least one row of the batch [ours].
ACTING = 0.5


class ModelSizes:
    """The dimensions of a model, from its transformers config."""

    def __init__(self, config):
        text = config.get_text_config()
        self.hidden = text.hidden_size
        self.layers = text.num_hidden_layers
        self.vocabulary = text.vocab_size
        self.intermediate = getattr(text, "intermediate_size", None) or 4 * self.hidden
        # State-space models, such as Mamba, have no attention heads in their config.
        self.heads = getattr(text, "num_attention_heads", None) or 0
        head = getattr(text, "head_dim", None) or self.hidden // max(1, self.heads)
        self.queries = self.heads * head
        self.keys = (getattr(text, "num_key_value_heads", None) or self.heads) * head

    @property
    def layer(self) -> int:
        """The activation memory of one layer in bf16, in bytes per token.

        A layer stores these tensors for its backward pass: the inputs and outputs of two norms,
        four tensors of the gated MLP, the values, the output of attention, and the queries and keys
        before and after their norms and RoPE. Some of these tensors share memory, so the sum is
        multiplied by 0.9. The factor comes from measurements of peak memory on an H100.
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
    """Estimates the memory that training needs on each GPU.

    Args:
        ranks: The number of GPUs that the model is sharded over.
        tokens: The number of tokens in a forward pass.
        keeps_reference: Whether the reference model, pi_ref, stays in memory during training.

    Returns:
        Two sizes in bytes: the model states (weights, gradients and the two AdamW moments in fp32,
        and the reference model), and the activations of one forward pass.
    """
    size = ModelSizes(config)
    states = (20 if keeps_reference else 16) * parameters / ranks
    stream = 2  # bytes per number in the residual stream
    # Without FSDP2, the model runs under autocast, which caches a bf16 copy of the weights. The
    # residual stream is in fp32.
    if ranks == 1:
        states += 2 * parameters
        stream = 4
    token = stream * size.hidden * size.layers + size.layer
    if not recompute:
        token = size.layer * size.layers
    token += 10 * ACTING * size.vocabulary  # logits in bf16 and in fp32, and the fp32 gradient
    return states, token * tokens


def check_memory(
    config,
    parameters: int,
    ranks: int,
    tokens: int,
    keeps_reference: bool,
) -> str | None:
    """Returns a message with a remedy if training or an inference copy does not fit in memory.

    The estimate assumes gradient checkpointing. The arguments are those of `training_bytes`.
    """
    memory = torch.cuda.get_device_properties(0).total_memory
    setup = f"{parameters / 1e9:.2f} B parameters on {ranks} x {memory / 1e9:.0f} GB: "
    if 2 * parameters > USABLE * memory:
        return (f"{setup}the inference copy takes {2 * parameters / 1e9:.0f} GB on each GPU; use "
                "larger GPUs or a smaller model")
    states, activations = training_bytes(config, parameters, ranks, tokens, True, keeps_reference)
    longest = int((USABLE * memory - states) / activations * tokens)
    if longest >= tokens:
        return None
    needs = (f"{setup}on each GPU, weights and optimiser states take {states / 1e9:.0f} GB and a "
             f"forward pass takes {activations / 1e9:.0f} GB; ")
    if longest >= 1024:
        return (f"{needs}lower --tokens-per-forward, and --max-tokens if it is larger, to "
                f"{longest // 512 * 512}")
    return f"{needs}use more or larger GPUs, or a smaller model"


def free_memory() -> int:
    free, _ = torch.cuda.mem_get_info()
    return free


def slots_that_fit(
    config,
    free: float,
    tokens: int,
    bf16: bool = True,
    prefill_tokens: int = 4096,
) -> int:
    """Returns the number of episodes that a GPU can run in parallel, at most SLOTS.

    Args:
        free: The free memory on the GPU in bytes, after the model was loaded.
        tokens: The maximum number of tokens in an episode. The KV cache is padded, so each episode
            takes as much memory as an episode of this length.
        bf16: Whether the model runs in bf16. If False, it runs in fp32.
        prefill_tokens: The maximum number of tokens in a prefill pass, summed over its episodes.
    """
    size = ModelSizes(config)
    number = 2 if bf16 else 4  # bytes per number
    # A prefill pass needs memory for the activations of one layer, and for an integer attention
    # mask over all cache slots.
    layer = number * (6 * size.hidden + 3 * size.intermediate)
    prefill = prefill_tokens * (layer + 12 * tokens)
    # Each episode needs memory for the keys and values of all layers, and for the logits that the
    # next token is sampled from.
    row = number * 2 * size.layers * size.keys * tokens + 32 * size.vocabulary
    return max(1, min(SLOTS, int((USABLE * free - prefill) / row)))


def fits_in_fp32(config, parameters: int, free: float, tokens: int) -> bool:
    """Returns True if the numerical self-check, which runs in fp32, fits in `free` bytes of a GPU.

    `tokens` is the length of the longest test sequence.
    """
    # The estimate assumes that the attention scores are stored. In fp32 on CUDA, grouped-query
    # attention without a mask has no fused kernel: FlashAttention does not support fp32, and the
    # memory-efficient kernel of torch does not support grouped-query attention.
    sequences, copies, bytes_per_score = 3, 3, 4
    scores = sequences * copies * ModelSizes(config).heads * tokens ** 2 * bytes_per_score
    return 4 * parameters + scores < USABLE * free


def check_torch() -> None:
    """Raises UsageError if the machine has a GPU, but the installed torch cannot use it.

    Without this error, torch would silently train on the CPU, which takes weeks. To train on the
    CPU on purpose, set CUDA_VISIBLE_DEVICES to an empty string or to -1.
    """
    wants_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    if wants_gpu and not torch.cuda.is_available() and has_gpu():
        raise UsageError(f"torch {torch.__version__} cannot use this machine's GPUs; install torch "
                         "for them (pytorch.org/get-started) or fix their driver, or set "
                         "CUDA_VISIBLE_DEVICES= to train on the CPU")


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Returns True if the machine has an NVIDIA or AMD GPU. run.sh uses the same rule.

    A container may have only some of these device files, and WSL has none, so nvidia-smi is also
    tried.
    """
    if (devices / "kfd").exists() or any(devices.glob("nvidia[0-9]*")):
        return True
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError:
        return False
    return listed.stdout.startswith("GPU ")
