"""Valid checkpoints are read, and invalid ones are refused."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save, save_file

from deltawire.dtypes import DTYPES, DType
from deltawire.errors import CheckpointError
from deltawire.format.checkpoints.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from deltawire.format.safetensors_header import MalformedHeader, TensorEntry, build_header, parse_header, place_in_order

Tensors = dict[str, NDArray[Any]]


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_sharded(directory: Path, shards: dict[str, Tensors], **index: Any) -> None:
    directory.mkdir(exist_ok=True)
    for file_name, tensors in shards.items():
        save_file(tensors, directory / file_name, metadata={"format": "pt"})
    weight_map = {name: file_name for file_name, tensors in shards.items() for name in tensors}
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map, **index}))


def two_shards() -> dict[str, Tensors]:
    return {
        "model-00001-of-00002.safetensors": {"a": np.arange(6, dtype=np.float32).reshape(2, 3)},
        "model-00002-of-00002.safetensors": {"b": np.arange(4, dtype=np.int8)},
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_every_element_type_reads_as_the_library_wrote_it(tmp_path: Path, dtype: DType) -> None:
    values = np.arange(24, dtype=np.uint8).repeat(dtype.itemsize).view(dtype.numpy).reshape(2, 3, 4)
    if dtype.name == "BOOL":
        values = np.ones((2, 3, 4), np.bool_)
    save_file({"w": values}, tmp_path / "x.safetensors")
    found = Checkpoint(tmp_path / "x.safetensors")["w"]
    assert found.dtype == dtype.numpy
    assert found.shape == (2, 3, 4)
    assert found.tobytes() == values.tobytes()


def test_scalars_and_tensors_without_elements_read_with_their_shapes(tmp_path: Path) -> None:
    save_file({"s": np.array(3.5), "z": np.zeros((0, 7), np.float32), "t": np.zeros((4, 0), np.int8)}, tmp_path / "x.safetensors")
    checkpoint = Checkpoint(tmp_path / "x.safetensors")
    assert checkpoint["s"] == 3.5
    assert {name: checkpoint[name].shape for name in checkpoint} == {"s": (), "z": (0, 7), "t": (4, 0)}
    assert checkpoint.weight_bytes == 8


def test_a_file_without_tensors_is_an_empty_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(save({}))
    assert dict(Checkpoint(tmp_path / "x.safetensors")) == {}


def test_arrays_cannot_be_written(tmp_path: Path) -> None:
    save_file({"w": np.zeros(3)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="read-only"):
        Checkpoint(tmp_path / "x.safetensors")["w"][0] = 1


def test_data_that_is_not_aligned_is_read_aligned(tmp_path: Path) -> None:
    text = json.dumps({"w": entry("I64", [2], [0, 16])}).encode()
    text += b" " * (5 - (len(text) + 8) % 8)
    (tmp_path / "x.safetensors").write_bytes(file_of(text, struct.pack("<2q", 7, -9)))
    found = Checkpoint(tmp_path / "x.safetensors")["w"]
    assert found.flags.aligned
    assert not found.flags.writeable
    assert found.tolist() == [7, -9]


def test_a_directory_with_one_file_is_read(tmp_path: Path) -> None:
    save_file({"w": np.arange(3)}, tmp_path / SINGLE_FILE)
    assert Checkpoint(tmp_path)["w"].tolist() == [0, 1, 2]


def test_a_sharded_directory_is_read_as_one(tmp_path: Path) -> None:
    write_sharded(tmp_path, two_shards())
    checkpoint = Checkpoint(tmp_path)
    assert list(checkpoint) == ["a", "b"]
    assert len(checkpoint) == 2
    assert checkpoint["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert checkpoint["b"].tolist() == [0, 1, 2, 3]
    assert checkpoint.weight_bytes == 28


def test_a_snapshot_of_the_hub_cache_is_read_through_its_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    write_sharded(blobs, two_shards())
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    assert list(Checkpoint(snapshot)) == ["a", "b"]


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..",
        ".",
        "",
        "a\\x.safetensors",
        "C:x.safetensors",
        "x.bin",
        "x\0.safetensors",
    ],
)
def test_an_index_that_names_files_elsewhere_is_refused(tmp_path: Path, shard: str) -> None:
    save_file({"w": np.zeros(1)}, tmp_path / "x.safetensors")
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "sub").mkdir(parents=True)
    save_file({"w": np.zeros(1)}, checkpoint / "sub" / "x.safetensors")
    (checkpoint / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(CheckpointError, match="Do not trust"):
        Checkpoint(checkpoint)


@pytest.mark.parametrize("linked", ["model-00001-of-00002.safetensors", INDEX_FILE])
def test_a_link_out_of_the_directory_is_refused(tmp_path: Path, linked: str) -> None:
    write_sharded(tmp_path / "checkpoint", two_shards())
    (tmp_path / "checkpoint" / linked).rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoint" / linked).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="leads out of the checkpoint"):
        Checkpoint(tmp_path / "checkpoint")


def test_a_link_within_the_directory_is_followed(tmp_path: Path) -> None:
    write_sharded(tmp_path, two_shards())
    (tmp_path / "model-00001-of-00002.safetensors").rename(tmp_path / "blob")
    (tmp_path / "model-00001-of-00002.safetensors").symlink_to("blob")
    assert "a" in Checkpoint(tmp_path)


def _without_a_shard(directory: Path) -> None:
    (directory / "model-00002-of-00002.safetensors").unlink()


def _with_a_tensor_in_two_shards(directory: Path) -> None:
    save_file({"a": np.zeros(1), "b": np.zeros(1)}, directory / "model-00002-of-00002.safetensors")


def _with_a_tensor_the_index_misses(directory: Path) -> None:
    save_file({"b": np.zeros(1), "c": np.zeros(1)}, directory / "model-00002-of-00002.safetensors")


def _with_a_tensor_the_shard_misses(directory: Path) -> None:
    save_file({"a": np.zeros(1)}, directory / "model-00001-of-00002.safetensors")
    save_file({}, directory / "model-00002-of-00002.safetensors")


def _with_swapped_shards(directory: Path) -> None:
    first, second = directory / "model-00001-of-00002.safetensors", directory / "model-00002-of-00002.safetensors"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def _with_a_single_file_too(directory: Path) -> None:
    save_file({"a": np.zeros(1)}, directory / SINGLE_FILE)


def _with_index(text: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / INDEX_FILE).write_text(text)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_a_shard, "is missing"),
        (_with_a_tensor_in_two_shards, "is in both"),
        (_with_a_tensor_the_index_misses, "'c' of .* is not in the index"),
        (_with_a_tensor_the_shard_misses, "says that tensor 'b' is in"),
        (_with_swapped_shards, "says that tensor"),
        (_with_a_single_file_too, "holds both"),
        (_with_index("{"), "JSON cannot be read"),
        (_with_index("[]"), "not an object"),
        (_with_index("{}"), "weight_map"),
        (_with_index('{"weight_map": []}'), "weight_map"),
        (_with_index('{"weight_map": {"a": 1}}'), "weight_map"),
        (_with_index('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'), "occurs twice"),
    ],
)
def test_a_directory_that_contradicts_itself_is_refused(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    write_sharded(tmp_path, two_shards())
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


def test_a_directory_without_a_checkpoint_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="completely downloaded"):
        Checkpoint(tmp_path)
    save_file({"a": np.zeros(1)}, tmp_path / "adapter.safetensors")
    with pytest.raises(CheckpointError, match=r"Pass one of its files instead: adapter\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too few"),
        (b"\0" * 7, "too few"),
        (struct.pack("<Q", 100_000_001) + b"{}", "not a safetensors file"),
        (b"PK\x03\x04 and the rest of a zip file", "not a safetensors file"),
        (struct.pack("<Q", 99) + b"{}", "ends inside its header"),
        (file_of(b"{"), "JSON cannot be read"),
        (file_of(b"\xff\xfe"), "JSON cannot be read"),
        (file_of(b"[" * 100_000), "JSON cannot be read"),
        (file_of(b'{"__metadata__": {"x": NaN}}'), "JSON cannot be read"),
        (file_of(rb'{"\ud800": 1}'), "JSON cannot be read"),
        (file_of(b"[]"), "not an object"),
        (file_of(b'{"a": 1, "a": 2}'), "'a' occurs twice"),
        (file_of({"__metadata__": {"x": 1}}), "__metadata__"),
        (file_of({"__metadata__": []}), "__metadata__"),
        (file_of({"__metadata__": {"deltawire": "delta/1"}}), "is a delta"),
        (file_of({"a": 1}), "exactly dtype"),
        (file_of({"a": {**entry(), "more": 1}}, b"\0" * 8), "exactly dtype"),
        (file_of({"a": entry("F4", [16], [0, 8])}, b"\0" * 8), "'a': element type 'F4' is not supported"),
        (file_of({"a": entry("C64", [1], [0, 8])}, b"\0" * 8), "'a': element type 'C64' is not supported"),
        (file_of({"a": entry(1)}, b"\0" * 8), "no usable dtype"),  # type: ignore[arg-type]
        (file_of({"a": entry(shape=[-2])}, b"\0" * 8), "no usable shape"),
        (file_of({"a": entry(shape=[2.0])}, b"\0" * 8), "no usable shape"),
        (file_of({"a": entry(shape=[True, 2])}, b"\0" * 8), "no usable shape"),
        (file_of({"a": entry(shape=2)}, b"\0" * 8), "no usable shape"),
        (file_of({"a": entry(shape=[1] * 33)}, b"\0" * 8), "no usable shape"),
        (file_of({"a": entry(shape=[0, 1 << 61, 1 << 61], offsets=[0, 0])}), "no usable shape"),
        (file_of({"a": entry(offsets=[8, 0])}, b"\0" * 8), "no usable data_offsets"),
        (file_of({"a": entry(offsets=[0])}, b"\0" * 8), "no usable data_offsets"),
        (file_of({"a": entry(offsets=[-8, 0])}, b"\0" * 8), "no usable data_offsets"),
        (file_of({"a": entry(shape=[3])}, b"\0" * 8), "do not fit"),
        (file_of({"a": entry(offsets=[4, 12])}, b"\0" * 12), "leaves a hole"),
        (file_of({"a": entry(), "b": entry(offsets=[4, 12])}, b"\0" * 12), "overlaps"),
        (file_of({"a": entry()}, b"\0" * 7), "1 bytes are missing"),
        (file_of({"a": entry()}, b"\0" * 9), "1 bytes after the last tensor"),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(tmp_path / "x.safetensors")
    assert "x.safetensors" in str(caught.value)


def test_an_object_that_is_not_a_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        Checkpoint(tmp_path / "pipe")


def test_a_missing_checkpoint_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Checkpoint(tmp_path / "nothing")


_VALID = save({"w": np.arange(6, dtype=np.float32), "ü": np.zeros((2, 0)), "b": np.arange(3, dtype=np.int8)}, metadata={"format": "pt"})


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(_VALID) - 1), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 16))
def test_a_damaged_header_is_refused_or_stays_within_the_file(changes: list[tuple[int, int]], cut: int) -> None:
    damaged = bytearray(_VALID[: len(_VALID) - cut])
    for position, value in changes:
        if position < len(damaged):
            damaged[position] = value
    length = int.from_bytes(damaged[:8], "little")
    if length > len(damaged) - 8:
        return
    try:
        header = parse_header(bytes(damaged[8 : 8 + length]), len(damaged))
    except MalformedHeader:
        return
    ends = [header.data_start + tensor.end for tensor in header.entries.values()]
    assert max(ends, default=header.data_start) == len(damaged)


_shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
_tensors = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.tuples(st.sampled_from(DTYPES), _shapes), max_size=8
)


@given(_tensors)
def test_a_header_that_is_built_is_aligned_and_reads_back(tensors: dict[str, tuple[DType, tuple[int, ...]]]) -> None:
    tensors.pop("__metadata__", None)
    placed: list[tuple[str, TensorEntry]] = place_in_order([(name, *rest) for name, rest in tensors.items()])
    built = build_header(placed, {"format": "pt"})
    header = parse_header(built[8:], len(built) + max((tensor.end for _, tensor in placed), default=0))
    assert header.data_start == len(built)
    assert header.data_start % 8 == 0
    assert header.entries == dict(placed)
    assert all(tensor.begin % tensor.dtype.itemsize == 0 for tensor in header.entries.values())
