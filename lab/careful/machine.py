"""What a machine can do, known before anything is loaded: whether torch can use its GPUs, and
whether they hold a model. The checks give one line with the remedy, or None.
"""

import math
import os
import sys
from pathlib import Path

import torch

import dpo

FREE = 0.92  # of a card's memory: contexts, NCCL's buffers and the allocator's gaps take the rest
ACTING = 0.5  # of a pass's tokens, those whose next token is an action of some row [ours]


def check_torch(devices: Path = Path("/dev")) -> str | None:
    """Why this torch cannot use the GPUs that the machine has, listed in `devices`, and the command
    that mends it; None where it can. An empty CUDA_VISIBLE_DEVICES asks for the CPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or torch.cuda.is_available():
        return None
    amd = not (devices / "nvidia0").exists()
    if amd and not (devices / "kfd").exists():
        return None
    if torch.version.hip if amd else torch.version.cuda:
        return (f"this machine has GPUs, but torch {torch.__version__} cannot reach them; update "
                "their driver, or set CUDA_VISIBLE_DEVICES= to train on the CPU")
    index = "https://pypi.org/simple"
    if amd:
        file = Path("/opt/rocm/.info/version")
        version = ".".join(file.read_text().split(".")[:2]) if file.exists() else "X.Y"
        index = f"https://download.pytorch.org/whl/rocm{version}"
    return (f"this machine has {'AMD' if amd else 'NVIDIA'} GPUs, and torch {torch.__version__} "
            f"was built without them: {sys.executable} -m pip install --force-reinstall "
            f"--index-url {index} torch; or set CUDA_VISIBLE_DEVICES= to train on the CPU")


def check_memory(config, ranks: int, card_bytes: float, tokens: int,
                 beside: bool = False) -> str | None:
    """Why so many cards of this memory cannot train a model and play it, and what can; or None.

    Args:
        config: That of the model.
        ranks: Over how many of them it is in parts.
        card_bytes: The memory of each.
        tokens: Of a pass.
        beside: Whether pi_ref stays beside what is trained.
    """
    room, (parameters, states, token) = FREE * card_bytes, costs(config, ranks, beside)
    said = f"{parameters / 1e9:.2f} B parameters on {ranks} x {card_bytes / 1e9:.0f} GB: "
    if 2 * parameters > room:
        return (f"{said}the copy that plays takes {2 * parameters / 1e9:.0f} GB on each; give "
                "larger cards, or a smaller model")
    longest, left = int((room - states) // token), room - tokens * token
    if longest >= tokens:
        return None
    what = "weights, gradients, moments and pi_ref" if beside else "weights, gradients and moments"
    takes = (f"{said}{what} take {states / 1e9:.0f} GB on each, a pass of "
             f"{tokens:,} tokens {tokens * token / 1e9:.0f}; ")
    if longest >= 1024:
        return f"{takes}lower --tokens-per-forward to {longest // 512 * 512}"
    cards = "larger"
    if left > 0:
        cards = f"{max(2, math.ceil(in_parts(parameters, beside) / left))} such"
    return f"{takes}give {cards} cards, or a smaller model"


def costs(config, ranks: int, beside: bool = False) -> tuple[int, float, float]:
    """A model's parameters; in bytes on a card what its training takes, and a pass for each token.
    With one rank autocast holds a bf16 copy beside what is in parts. A bf16 pass keeps a layer's
    input for each layer, the inside of one layer and logits."""
    c, parameters = config.get_text_config(), dpo.parameter_count(config)
    states = in_parts(parameters, beside) / ranks + (2 * parameters if ranks == 1 else 0)
    return parameters, states, (2 * c.hidden_size * (c.num_hidden_layers + 8) + 8 * inside(c)
                                # logits in bf16, in fp32, and their gradient
                                + 10 * ACTING * c.vocab_size)


def in_parts(parameters: int, beside: bool) -> int:
    """The bytes that lie in parts over the ranks: weights, gradients and AdamW's two moments in
    fp32, and pi_ref beside them."""
    return (20 if beside else 16) * parameters


def inside(config) -> int:
    return getattr(config, "intermediate_size", None) or 4 * config.hidden_size
