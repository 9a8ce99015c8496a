"""Which segments a GPU quantises and encodes together."""

from __future__ import annotations

import numpy as np
import pytest

from deltawire.publish import batches
from deltawire.publish.batches import batches_of_quantised, cut_for_gpu
from deltawire.publish.publication import Publication
from deltawire.publish.quantising import Quantising
from deltawire.publish.upload.segments import TensorTable, cut_segments


def test_weights_on_the_host_are_encoded_a_segment_at_a_time():
    state = {"a.weight": np.ones((128, 128), np.float32), "b.weight": np.ones((128, 128), np.float32)}
    plain = Publication(state, TensorTable.of(state), None, {}, None)
    segments = cut_segments(plain.table.sizes, segment_bytes=1)
    assert cut_for_gpu(plain, state, segments) is None
    quantising = Quantising("fp8-block", None)
    layout = quantising.layout_of(state)
    assert batches_of_quantised(layout, quantising.table_of(layout), state, segments) is None


@pytest.mark.parametrize(("recipe", "expected"), [("nvfp4", 1), ("int4", 5)])
def test_only_what_is_written_counts(recipe, expected, monkeypatch):
    torch = pytest.importorskip("torch")
    from deltawire.tensors import torch_types

    monkeypatch.setattr(torch_types, "gpu_of", lambda tensor: torch.device("cuda", 0))
    monkeypatch.setattr("deltawire.quantise.gpu.quantised_codes.can_be_quantised_as_read", lambda *arguments: True)
    monkeypatch.setattr(batches, "_LEAST_WRITTEN", 1)
    state = {f"layers.{i}.weight": torch.ones(128, 128) for i in range(4)} | {"norm.weight": torch.ones(4096, dtype=torch.bfloat16)}
    quantising = Quantising(recipe, None)
    layout = quantising.layout_of(state)
    table = quantising.table_of(layout)
    segments = cut_segments(table.sizes, segment_bytes=8192)
    found = batches_of_quantised(layout, table, state, segments)
    assert [index for batch in found for index in batch] == list(range(len(segments)))
    assert len(found) == expected
