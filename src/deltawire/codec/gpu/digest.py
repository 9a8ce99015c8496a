"""The state digest on the GPU (docs/format.md §2): one pass at the speed of memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ..base import Lanes
from .compiler import kernels
from .spans import SUMS, Facts, lanes, place_tiles, spans_of, upload


def digest_tensors(tensors: Sequence[Facts], device: torch.device) -> list[Lanes]:
    """The word sums of tensors of one width, on the current stream."""
    return lanes(start_digest(tensors, device).cpu().numpy().view(SUMS)["before"])


def start_digest(tensors: Sequence[Facts], device: torch.device) -> torch.Tensor:
    """The same, not waited for: `SUMS` of all tensors on the device."""
    sums = torch.zeros(len(tensors) * SUMS.itemsize, dtype=torch.uint8, device=device)
    spans = spans_of(tensors)
    ntiles = place_tiles(spans)
    kernel = kernels(tensors[0].dtype.width, device.index)
    arguments = [upload(spans, device), ctypes.c_uint32(len(spans)), ctypes.c_uint32(ntiles), sums]
    kernel.launch("digest", min(-(-ntiles // 8), 3 * kernel.processors), 256, arguments)
    return sums
