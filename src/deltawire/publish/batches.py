"""Which segments a GPU quantises and encodes together. It waits for the host between batches, so few batches are fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..quantise import QuantisedLayout
from ..quantise.whole_weights import unwritten_roles
from ..tensors import torch_types
from ..tensors.bits import State
from .publication import Publication
from .snapshots import Arrays, are_on_gpu
from .upload.segments import Segment, TensorTable, cut_batches

_BATCH_BYTES = 32 << 30
"""The most bytes of weights that a GPU encodes at a time."""

_WRITTEN_SHARE, _LEAST_WRITTEN = 1 / 80, 64 << 20
"""How much memory of a GPU the new tensors of a batch may take if codes are not written: a share of the published bytes, or this many bytes
if that is more. They are scales of more than one byte, and tensors that are not quantised."""


def cut_for_gpu(publication: Publication, baseline: Arrays, segments: Sequence[Segment]) -> Sequence[Sequence[int]] | None:
    """Return the batches of a publication that is encoded against a baseline.

    Return None if segments are made and encoded one at a time: on the host, with a baseline on the host, and if a GPU needs memory for all
    new tensors.
    """
    layout = publication.layout
    if not are_on_gpu(baseline):
        return None  # it is copied to the GPU, a little at a time
    if layout is not None:
        return batches_of_quantised(layout, publication.table, publication.weights, segments)
    return cut_batches([segment.raw for segment in segments], _BATCH_BYTES) if are_on_gpu(publication.weights) else None


def batches_of_quantised(
    layout: QuantisedLayout, table: TensorTable, weights: State, segments: Sequence[Segment]
) -> Sequence[Sequence[int]] | None:
    """Return the batches of weights that one GPU quantises while it encodes them, so that codes are not written. None: it cannot."""
    if torch_types.torch_tensor() is None or not layout.weights:
        return None
    first = weights[layout.weights[0].source]
    device = torch_types.gpu_holding(first)
    if device is None:
        return None
    from ..quantise.gpu.quantised_codes import can_be_quantised_as_read

    if not can_be_quantised_as_read(layout.weights, weights, device):
        return None
    return _cut_by_written([_written_bytes(layout, table, segment) for segment in segments], table.state_bytes)


def batches_of_parts(
    written_bytes: Callable[[str], int], baseline: State, parts: State | None, table: TensorTable, segments: Sequence[Segment]
) -> Sequence[Sequence[int]] | None:
    """Return the batches of one process that publishes parts of tensors. None: one segment at a time.

    `parts` are all parts, if they exist already. If not, `written_bytes` are the bytes of new memory that the part of a tensor takes.
    """
    if not are_on_gpu(baseline):
        return None
    if parts is not None:
        return cut_batches([segment.raw for segment in segments], _BATCH_BYTES) if are_on_gpu(parts) else None
    costs = [sum(map(written_bytes, table.names_of(segment))) for segment in segments]
    return _cut_by_written(costs, sum(segment.raw for segment in segments))


def _cut_by_written(costs: Sequence[int], published: int) -> Sequence[Sequence[int]]:
    return cut_batches(costs, max(int(_WRITTEN_SHARE * published), _LEAST_WRITTEN))


def _written_bytes(layout: QuantisedLayout, table: TensorTable, segment: Segment) -> int:
    """Return the bytes of a segment's tensors that are neither codes, nor scales of one byte, nor published as they are."""
    end = segment.first + segment.count
    total = 0
    for name, size in zip(table.names[segment.first : end], table.sizes[segment.first : end], strict=True):
        output = layout.outputs[name]
        is_as_given = output.weight is None and layout.specs[name].dtype == output.dtype
        if not is_as_given and output.role not in unwritten_roles(layout.recipe):
            total += size
    return total
