"""On a CPU, a product of few rows takes as long as its weights take to read: read them in 8 bits.

Only drafts come from these products, so what rounding changes is which drafts are proposed, never
what the target accepts.

Shape suffixes: R rows, I input size, O output size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# With more rows the bfloat16 product, which has instructions of its own, is the faster one
# (docs/lab-notes.md).
MOST_ROWS = 8
# torch's operator reads whole vectors and checks nothing: other sizes crash the process.
_MULTIPLE = 32


class RoundedWeight:
    """A weight matrix in int8, each row to its own scale."""

    def __init__(self, weight_OI: Tensor) -> None:
        """Round `weight_OI`, bfloat16 on a CPU, to the nearest of 255 steps a row."""
        rows_OI = weight_OI.float()
        scales_O = (rows_OI.abs().amax(dim=-1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        self.steps_OI = (rows_OI / scales_O.unsqueeze(-1)).round().to(torch.int8)
        self.scales_O = scales_O.to(weight_OI.dtype)

    def product(self, x_RI: Tensor) -> Tensor:
        """`x_RI` with the transposed weight, [R, O] in the dtype of `x_RI`."""
        return torch._weight_int8pack_mm(x_RI, self.steps_OI, self.scales_O)


def rounded(weight_OI: Tensor) -> RoundedWeight | None:
    """`weight_OI` rounded, where that can be done and pays: bfloat16 on a CPU. None elsewhere.

    float32 is what users choose who want every digit; GPUs run the heads inside captured graphs.
    """
    pays = weight_OI.device.type == "cpu" and weight_OI.dtype == torch.bfloat16
    possible = all(size > 0 and size % _MULTIPLE == 0 for size in weight_OI.shape)
    # Not a documented operator of torch's: a release may lack it.
    known = hasattr(torch, "_weight_int8pack_mm")
    return RoundedWeight(weight_OI) if pays and possible and known else None


class FewRowsRounded(nn.Module):
    """A layer without bias that goes through its rounded weight when it is given few rows."""

    def __init__(self, layer: nn.Module, weight: RoundedWeight) -> None:
        """`weight` is `layer`'s own, rounded."""
        super().__init__()
        self.layer = layer
        self.weight = weight

    def forward(self, x_RI: Tensor) -> Tensor:
        """The layer's output, [R, O]."""
        if len(x_RI) <= MOST_ROWS:
            return self.weight.product(x_RI)
        output: Tensor = self.layer(x_RI)
        return output
