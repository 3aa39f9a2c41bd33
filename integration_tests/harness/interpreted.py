"""What Triton's interpreter needs before V2 runs on a CPU: a backend that says it is active, and a
torch version of each kernel that the interpreter cannot run.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def pretend_triton_backend() -> None:
    """Let Triton's interpreter run on a CPU: vLLM asks for an active backend before using it."""
    import triton.backends

    class Driver:
        """A driver that says it is active."""

        @staticmethod
        def is_active() -> bool:
            """Always: the interpreter needs no device."""
            return True

    class Backend:
        """A backend with nothing but that driver."""

        compiler = None
        driver = Driver

    triton.backends.backends["cpu"] = Backend


class GrammarBitmask:
    """Stands in for V2's `_apply_grammar_bitmask_kernel`, which is called as `kernel[grid](...)`.

    The interpreter refuses the kernel's mask ("mask has unsupported dtype"), with speculation and
    without. Which rows of the logits are masked is the engine's own arithmetic, copied here.
    """

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """The launcher; the grid is not needed."""
        return self.launch

    @staticmethod
    def launch(
        logits_NV: Any,
        _logits_stride: int,
        places_M: Any,
        cu_num_logits: Any,
        bitmask_MW: Any,
        _bitmask_stride: int,
        vocab_size: int,
        *,
        MASK_STRIDE: int,
        BLOCK_SIZE: int,  # noqa: ARG004
    ) -> None:
        """Bar every token whose bit is not set, in each row that a request has."""
        import torch

        bits_V = torch.arange(vocab_size)
        for place, words_W in zip(places_M.tolist(), bitmask_MW, strict=True):
            request, position = divmod(place, MASK_STRIDE)
            row = int(cu_num_logits[request]) + position
            if row < int(cu_num_logits[request + 1]):
                allowed_V = (words_W[bits_V // 32] >> (bits_V % 32)) & 1
                logits_NV[row, allowed_V == 0] = -float("inf")


def replace_kernels() -> None:
    """Put the stand-ins in the kernels' places, for the life of this process.

    That of `top_k` and `top_p` is the engine's own for fewer than eight rows: the interpreter makes
    numbers of the kernel's arguments that are 1, and those have no `.to()`.
    """
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu import structured_outputs
    from vllm.v1.worker.gpu.sample import gumbel

    structured_outputs._apply_grammar_bitmask_kernel = GrammarBitmask()
    if hasattr(gumbel, "tldevice"):  # vLLM 0.29; the interpreter has no device library
        gumbel.tldevice = SimpleNamespace(log1p=lambda x: gumbel.tl.log(1 + x))
    top_k_top_p = topk_topp_sampler.apply_top_k_top_p_pytorch
    # vLLM 0.33 also says which rows have `top_p` alone, a hint to its kernel.
    topk_topp_sampler.apply_top_k_top_p_triton = lambda logits, k, p, **_: top_k_top_p(logits, k, p)
