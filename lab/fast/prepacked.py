"""Weights that do not train, in the order of the CPU's kernels: rollouts of a model of some size.

torch reorders a layer's weights in every product, which with the few rows of a pass of single
tokens takes longer than the product itself (docs/speed.md); rounded otherwise in fp32. The
operators are private to torch: without them the layers stay as they are.
"""

import torch
from torch import Tensor, nn

ROWS = 32           # that the order is chosen for; as fast with any number from 1 to 64 [measured]
SMALL = 10_000_000  # parameters [ours]; the tiny model's products are shorter than oneDNN's calls


class Prepacked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def prepack(model) -> None:
    """Reorders the weights of a model that does not train, unless it is small or on no x86 CPU."""
    if model.device.type != "cpu" or not known(model.dtype) or model.num_parameters() < SMALL:
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Prepacked
            ordered = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), ROWS)
            module.weight = nn.Parameter(ordered, requires_grad=False)


def known(dtype: torch.dtype) -> bool:
    """Whether torch has the operators, and oneDNN kernels of this CPU for a number format."""
    if not torch.backends.mkldnn.is_available():
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return False
    for operator in "_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported":
        if not hasattr(torch.ops.mkldnn, operator):
            return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32
