"""States in columns: they give the same results as tensors that are looked at one by one, and a series of calls reads a state once."""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType

import numpy as np
import pytest

import deltawire
from deltawire import Publisher, WriterOptions, _native, encode_delta, state_digest
from deltawire.codec import copy_elements, join_pieces
from deltawire.codec.native import native_tensors
from deltawire.delta import encode
from deltawire.publish.upload.segments import TensorTable
from deltawire.tensors import columns
from deltawire.tensors.casting import Casting
from deltawire.tensors.columns import Columns, ColumnState, in_columns


def sample(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    state = {f"layer.{number}.weight": rng.standard_normal((4, 1 + number)).astype(np.float32) for number in range(9)}
    state["strided"] = rng.integers(0, 99, (8, 6), np.int16)[::2, ::-1]
    state["empty"] = np.zeros((0, 3), np.float32)
    state["a.codes.weight_packed"] = rng.integers(0, 256, (5, 7), np.uint8)
    state["scalar"] = np.array(rng.standard_normal())
    odd = rng.integers(0, 256, 4 * 5 + 1, np.uint8)[1:].view(np.float32)
    return state | {"unaligned": odd}


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Columns, "of", classmethod(lambda cls, state: None))


def tied(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a state in which some tensors share their memory: two pairs of whole tensors, and a view that has another shape."""
    more = {"z.tied": state["layer.3.weight"], "b.tied": state["layer.3.weight"], "head": state["a.codes.weight_packed"]}
    return state | more | {"flat": state["layer.4.weight"].reshape(-1)}


@pytest.mark.parametrize("make", [sample, lambda seed=0: tied(sample(seed))], ids=["separate", "tied"])
def test_deltas_and_digests_are_those_of_tensors_that_are_looked_at_one_by_one(make, monkeypatch):
    old, new = make(0), make(1)
    quick = encode_delta(old, new), encode_delta(old, old), state_digest(new)
    with monkeypatch.context() as patch:
        one_by_one(patch)
        assert quick == (encode_delta(old, new), encode_delta(old, old), state_digest(new))
    target = {name: array.copy() for name, array in old.items()}
    deltawire.apply_delta(target, quick[0])
    assert {name: array.tobytes() for name, array in target.items()} == {name: array.tobytes() for name, array in new.items()}


def test_tied_states_are_encoded_in_columns(monkeypatch):
    monkeypatch.setattr(encode, "_work_on_pairs", lambda *_: pytest.fail("every tensor is looked at on its own"))
    encode_delta(tied(sample(0)), tied(sample(1)))


def test_a_publication_reads_the_tensors_of_a_state_once(tmp_path, monkeypatch):
    states = [{name: array.repeat(99, 0) if array.ndim else array for name, array in sample().items()} for _ in range(3)]
    for number, state in enumerate(states):
        state["layer.8.weight"][0, 0] = number
    with Publisher(tmp_path, run="run", attachments=(), options=WriterOptions(segment_bytes=64)) as publisher:
        publisher.publish(states[0])
        publisher.publish(states[1])
        publisher.flush()
        read = []
        made = columns._columns_of_arrays

        def counted(state, values):
            read.append(len(values))
            return made(state, values)

        monkeypatch.setattr(columns, "_columns_of_arrays", counted)
        publisher.publish(states[2])
        assert read == [len(states[2])]
        assert publisher.version.kind == "delta"


def test_a_part_of_a_state_has_the_tensors_of_its_segment():
    state = in_columns(sample())
    assert isinstance(state, ColumnState)
    part = state.part(2, 5)
    assert list(part) == sorted(state)[2:7]
    assert all(part[name] is state[name] for name in part)
    assert state_digest(part) == state_digest(dict(part))
    assert part.columns.layout is state.part(2, 5).columns.layout


def test_mappings_that_are_no_dicts_are_not_held():

    proxy = MappingProxyType(sample())
    assert in_columns(proxy) is proxy


def test_equal_layouts_are_one_object_whatever_the_order_of_names():
    state = sample()
    backwards = dict(reversed(state.items()))
    assert Columns.of(state).layout is Columns.of(backwards).layout


def test_few_layouts_are_kept_of_states_that_always_have_new_names(monkeypatch):
    monkeypatch.setattr(columns, "_MOST_STATES", 3)
    monkeypatch.setattr(columns, "_kept", OrderedDict())
    for number in range(5):
        assert Columns.of({f"layer.{number}": np.zeros(4)}).layout.names == [f"layer.{number}"]
    assert [key.parts[0] for key in columns._kept] == [("layer.2",), ("layer.3",), ("layer.4",)]


def test_states_of_other_shapes_have_other_layouts(monkeypatch):
    monkeypatch.setattr(columns, "_MOST_SHAPES", 2)
    for _ in range(2):
        for shape in ((2, 3), (3, 2), (6,), (2, 3)):
            found = Columns.of({"w": np.zeros(shape), "v": np.zeros(4)})
            assert found.layout.shapes == [(4,), shape]
            assert found[1].shape == shape


def test_elements_are_copied_whether_or_not_tensors_are_contiguous():
    for names in (None, ["layer.1.weight", "empty"]):
        source = {name: array for name, array in sample(1).items() if names is None or name in names}
        target = {name: np.zeros_like(array) for name, array in source.items()}
        copy_elements(Columns.of(source).bits, Columns.of(target).bits, 2)
        assert {name: array.tobytes() for name, array in target.items()} == {name: array.tobytes() for name, array in source.items()}


def test_large_pieces_are_joined_in_order():
    pieces = [b"head", bytes(range(256)) * (1 << 15), b"", memoryview(b"x" * 3_000_001), np.arange(9, dtype=np.uint8).data]
    assert join_pieces(pieces, 3) == b"".join(pieces)


@pytest.mark.parametrize(
    ("addresses", "counts", "itemsizes"),
    [([64, 64], [1], [4]), ([0], [1], [4]), ([64], [-1], [4]), ([66], [1], [4]), ([64], [1], [3])],
    ids=["lengths", "no memory", "negative", "unaligned", "size"],
)
def test_addresses_that_cannot_be_read_are_refused(addresses, counts, itemsizes):
    with pytest.raises(ValueError, match=r"columns differ|not valid|another size"):
        _native.Addresses(np.array(addresses, np.uint64), np.array(counts), np.array(itemsizes, np.uint8), "owner")


def test_tensors_that_are_not_plain_are_passed_one_by_one():
    state = sample()
    plain = {name: array for name, array in state.items() if name not in ("strided", "unaligned")}
    assert isinstance(native_tensors(Columns.of(state).bits), list)
    assert isinstance(native_tensors(Columns.of(plain).bits), _native.Addresses)


@pytest.mark.parametrize("dtype", [None, "bfloat16", lambda name, tensor: "float16" if name.startswith("layer.1") else None])
def test_a_table_of_cast_types_is_that_of_tensors_one_by_one(dtype, monkeypatch):
    state = sample() | {"half": np.zeros(4, np.float16), "wide": np.zeros(3)}
    quick = TensorTable.of(state, Casting(dtype))
    one_by_one(monkeypatch)
    assert quick == TensorTable.of(state, Casting(dtype))
