"""An anchor's files form a Hugging Face checkpoint."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from support import bits_of

from deltawire.dtypes import dtype_named
from deltawire.errors import CheckpointError
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.publish.attachments.read_files import MOST_FILES, read_attachments
from deltawire.publish.upload.checkpoint_files import lay_out
from deltawire.publish.upload.segments import TensorTable, cut_segments

RANDOM = np.random.default_rng(7)


def state() -> dict[str, np.ndarray]:
    odd = {"odd": RANDOM.integers(0, 255, 5).astype(np.uint8), "scalar": np.array(2.5), "none": np.zeros((0, 3), np.float32)}
    return odd | {f"w{i}": RANDOM.standard_normal((4, 8)).astype(ml_dtypes.bfloat16) for i in range(6)}


def write(state, directory, *, segment_bytes, shard_bytes):
    table = TensorTable.of(state)
    segments = cut_segments(table.sizes, segment_bytes=segment_bytes)
    layout = lay_out(table, segments, shard_bytes=shard_bytes)
    for shard in layout.shards:
        content = b"".join(shard.pieces(lambda index: {name: state[name] for name in table.names_of(segments[index])}))
        assert len(content) == shard.size
        (directory / shard.name).write_bytes(content)
    if layout.index is not None:
        (directory / "model.safetensors.index.json").write_bytes(layout.index)
    return layout


@pytest.mark.parametrize(("segment_bytes", "shard_bytes", "shards"), [(64, 10_000, 1), (64, 150, 3), (1, 1, 8), (10_000, 1, 1)])
def test_a_layout_is_a_checkpoint_of_that_state(tmp_path, segment_bytes, shard_bytes, shards):
    original = state()
    layout = write(original, tmp_path, segment_bytes=segment_bytes, shard_bytes=shard_bytes)
    assert len(layout.shards) == shards
    assert sum(shard.raw for shard in layout.shards) == sum(array.nbytes for array in original.values())
    assert bits_of(Checkpoint(tmp_path)) == bits_of(original)


def test_shards_are_named_and_indexed_as_hugging_face_does(tmp_path):
    original = state()
    layout = write(original, tmp_path, segment_bytes=64, shard_bytes=150)
    names = [shard.name for shard in layout.shards]
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in range(1, 4)]
    index = json.loads(layout.index)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in original.values())
    assert index["weight_map"].keys() == original.keys()
    for name, shard in index["weight_map"].items():
        with safe_open(tmp_path / shard, "numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert name in opened.keys()  # noqa: SIM118


def test_every_tensor_is_aligned_to_its_element_size(tmp_path):
    write(state(), tmp_path, segment_bytes=10_000, shard_bytes=10_000)
    checkpoint = Checkpoint(tmp_path)
    assert all(entry.begin % entry.dtype.itemsize == 0 for entry in map(checkpoint.entry, checkpoint))


def test_a_huge_checkpoint_has_few_shards():
    sizes = TensorTable(tuple(f"{i:04}" for i in range(400)), (dtype_named("U8"),) * 400, ((1 << 20,),) * 400)
    layout = lay_out(sizes, cut_segments(sizes.sizes, segment_bytes=1), shard_bytes=1)
    assert len(layout.shards) <= 100


def test_a_directory_gives_all_but_weights_and_hidden_files(tmp_path):
    for name in [
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        ".gitattributes",
    ]:
        (tmp_path / name).write_text(name)
    (tmp_path / "folder").mkdir()
    assert read_attachments(tmp_path) == {name: name.encode() for name in ["config.json", "tokenizer.json"]}
    assert read_attachments(str(tmp_path)) == read_attachments(tmp_path)
    assert read_attachments({"a": tmp_path / "config.json", "b": b"x"}) == {"a": b"config.json", "b": b"x"}
    assert read_attachments(None) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"a/b": b""},
        {"..": b""},
        {".hidden": b""},
        {"model.safetensors": b""},
        {"model.safetensors.index.json": b""},
        {"a": b"", "A": b""},
        {"a": 3},
        {3: b""},
        {"x" * 256: b""},
        {"a\n": b""},
        {f"file-{i}": b"" for i in range(MOST_FILES + 1)},
        {f"{i}" * 250: b"" for i in range(9)},
    ],
)
def test_attachments_that_cannot_be_part_of_a_checkpoint_are_refused(wrong):
    with pytest.raises(CheckpointError):
        read_attachments(wrong)


def test_attachments_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_attachments({"a": tmp_path / "missing"})
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_attachments(tmp_path / "missing")
