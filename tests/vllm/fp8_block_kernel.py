"""A vLLM plugin for tests. With DELTAWIRE_TEST_FP8_BLOCK, models in block-wise fp8 run on CPUs without AMX.

vLLM's own CPU kernels for this format need AMX and repack the weights. This kernel keeps the processing of vLLM's base class, as the
CUTLASS kernel for GPUs does, so weights and scales lie in memory as in the checkpoint. It multiplies dequantised weights in torch.
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    if os.environ.get("DELTAWIRE_TEST_FP8_BLOCK") is not None:
        install()


def install() -> None:
    """Add the kernel after vLLM's own ones, which are preferred where they run. It may be called twice."""
    from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.platforms.interface import PlatformEnum

    class DequantisingFp8BlockKernel(Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
        """Multiplies activations by dequantised weights. Activations are not quantised."""

        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> Any:
            rows, columns = self.weight_group_shape
            scales = Bs.float().repeat_interleave(rows, 0)[: B.shape[0]].repeat_interleave(columns, 1)[:, : B.shape[1]]
            return A.float() @ (B.float() * scales).T

    kernels: list[type[Any]] = _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if all(kernel.__name__ != DequantisingFp8BlockKernel.__name__ for kernel in kernels):
        kernels.append(DequantisingFp8BlockKernel)
