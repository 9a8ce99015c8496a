"""A delta is decoded in windows with the same result as at once. Small tensors have a tile each, so few of them fill a block."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deltawire import encode_delta
from deltawire.codec.varints import to_varint
from deltawire.delta.grouped_plan import GroupedPlan
from deltawire.delta.windows import can_cut, cut_windows, near_tensors
from deltawire.dtypes import dtype_of_numpy
from deltawire.errors import CorruptDelta
from deltawire.format.delta_file import parse
from deltawire.format.digest import Digest, TensorKeys
from deltawire.tensors.bits import TensorPart, tensor_bits
from deltawire.tensors.state import codec_for

State = dict[str, Any]


def tiny_state(seed: int = 0) -> State:
    """Return three blocks of tiny bfloat16 tensors, one of bytes, and tensors of 4-bit codes with several tiles."""
    rng = np.random.default_rng(seed)
    state: State = {f"a.{number:04}": rng.standard_normal(5).astype(ml_dtypes.bfloat16) for number in range(2500)}
    state |= {f"b.{number:04}": rng.integers(0, 256, 3, np.uint8) for number in range(2100)}
    state |= {f"c.{number}.weight_packed": rng.integers(0, 256, 40_000, np.uint8) for number in range(3)}
    state |= {f"d.{number}.weight_packed": rng.integers(0, 2**31, 9_000, np.int32) for number in range(3)}
    state["a.long"] = rng.standard_normal(70_000).astype(ml_dtypes.bfloat16)
    state["e.empty"] = np.zeros((0, 4), np.float32)
    return dict(sorted(state.items()))


def changed(state: State, share: float = 0.2) -> State:
    rng = np.random.default_rng(9)
    new = {name: array.copy() for name, array in state.items()}
    for array in new.values():
        bits = array.view(f"u{array.itemsize}")
        bits[rng.random(bits.shape) < share] ^= 1
    return new


def specs_of(state: State) -> Any:
    return {name: (dtype_of_numpy(array.dtype), array.shape) for name, array in state.items()}


def decode(state: State, windows: Any) -> tuple[State, Digest, Digest]:
    """Return the new state, and the sums of the digests of all windows."""
    new = {name: array.copy() for name, array in state.items()}
    before = after = Digest()
    for window in windows:
        parts = {
            name: TensorPart(state[name].reshape(-1)[start:stop], state[name].shape, start) for name, (start, stop) in window.parts.items()
        }
        plan = GroupedPlan(parts, window.file)
        codec = codec_for(plan.tensors)
        resolution = codec.resolution(1, 2**63)
        found = plan.resolve(resolution, codec, 1, None)
        before, after = before + found[0], after + found[1]
        for tensor, (indices, bits) in zip(plan.tensors, resolution.changes(plan.numbers.tolist()), strict=True):
            new[tensor.name].reshape(-1).view(bits.dtype)[np.asarray(indices) + tensor.start] = bits
    return new, before, after


@pytest.mark.parametrize("most_bytes", [1, 40 << 20, 1 << 40])
def test_windows_lead_to_the_same_state_and_digests(most_bytes: int) -> None:
    base = tiny_state()
    new = changed(base)
    file = parse(encode_delta(base, new))
    assert can_cut(file)
    windows = list(cut_windows(file, specs_of(base), lambda _: 1, most_bytes))
    assert len(windows) == {1: 7, 40 << 20: 6, 1 << 40: 4}[most_bytes]
    found, before, after = decode(base, windows)
    assert {name: array.tobytes() for name, array in found.items()} == {name: array.tobytes() for name, array in new.items()}
    tags = TensorKeys.of((name, *spec) for name, spec in specs_of(base).items()).tag()
    assert (before + tags, after + tags) == (file.before, file.after)


def test_a_window_has_the_blocks_that_the_same_readers_need() -> None:
    base = tiny_state()
    new = changed(base)
    file = parse(encode_delta(base, new))
    assert can_cut(file)

    def needs(name: str) -> int:
        return 2 if name >= "a.1500" else 1

    windows = list(cut_windows(file, specs_of(base), needs, 1 << 40))
    assert [window.decoders for window in windows if min(window.parts).startswith("a.")] == [1, 3, 2]
    mine = [window for window in windows if window.decoders & 2]
    found, _, _ = decode(base, mine)
    assert all(found[name].tobytes() == new[name].tobytes() for name in base if needs(name) == 2)
    assert found["a.0000"].tobytes() == base["a.0000"].tobytes()


def test_only_near_tensors_share_a_block_with_a_needed_one_wherever_files_begin() -> None:
    base = tiny_state()
    needed = {"a.1300", "b.0700", "c.1.weight_packed"}
    near = near_tensors(specs_of(base), needed.__contains__)
    assert {name for name in near if name < "a.2"} == {f"a.{number:04}" for number in range(1300 - 1023, 2000)}
    assert {"a.2322", "b.0000", "b.2099", "c.0.weight_packed", "c.2.weight_packed"} <= near
    assert not {"a.0276", "a.2324", "a.long", "d.0.weight_packed", "e.empty"} & near
    names, seen = list(base), set()
    for start in (0, 1, 276, 277, 278, 900, 1299, 1300):
        part = {name: base[name] for name in names[start:]}
        file = parse(encode_delta(part, changed(part)))
        assert can_cut(file)
        windows = cut_windows(file, specs_of(part), lambda name: 1 if name in needed else 2, 1 << 40)
        seen |= {name for window in windows if window.decoders & 1 for name in window.parts}
    assert seen <= near
    assert {"a.0277", "a.2323"} <= seen


def test_blocks_after_the_last_change_have_no_bytes() -> None:
    base = tiny_state()
    new = {name: array.copy() for name, array in base.items()}
    new["a.0003"].view("u2")[1] ^= 1
    file = parse(encode_delta(base, new))
    assert can_cut(file)
    windows = list(cut_windows(file, specs_of(base), lambda _: 1, 1))
    assert [bool(window.file.groups) for window in windows].count(True) == 1
    found, _, _ = decode(base, windows)
    assert all(found[name].tobytes() == new[name].tobytes() for name in base)


def test_parts_of_tensors_are_cut_too() -> None:
    base = {name: array for name, array in tiny_state().items() if name.startswith(("a.", "c."))}
    new = changed(base)
    ranges = {name: (1 << 15, 50_000) if name == "a.long" else (0, array.size) for name, array in base.items()}
    sides = [
        {name: TensorPart(state[name][slice(*part)], state[name].shape, part[0]) for name, part in ranges.items()} for state in (base, new)
    ]
    file = parse(encode_delta(*sides))
    assert can_cut(file)
    found, before, after = decode(base, cut_windows(file, specs_of(base), lambda _: 1, 1))
    assert (before, after) == (file.before, file.after)
    assert all(found[name][slice(*part)].tobytes() == new[name][slice(*part)].tobytes() for name, part in ranges.items())


def test_deltas_that_tie_or_add_tensors_are_not_cut() -> None:
    base = {"a": np.zeros(4, np.float32)}
    assert not can_cut(parse(encode_delta(base, {**base, "b": np.ones(4, np.float32)})))


@pytest.mark.parametrize("tiles", [0, 1025])
def test_a_chunk_that_does_not_fit_its_block_is_refused(tiles: int) -> None:
    base = tiny_state()
    file = parse(encode_delta(base, changed(base)))
    assert can_cut(file)
    payload = to_varint(tiles << 2) + to_varint(0)
    (code, _), *_ = ((code, span) for code, span in file.groups.items() if code == dtype_of_numpy(base["a.0000"].dtype).code)
    bad = dataclasses.replace(file, data=memoryview(payload), groups={code: (0, len(payload))})
    with pytest.raises(CorruptDelta, match="end of its block"):
        list(cut_windows(bad, specs_of(base), lambda _: 1, 1))
    with pytest.raises(CorruptDelta, match="does not have"):
        list(cut_windows(dataclasses.replace(bad, groups={15: (0, len(payload))}), specs_of(base), lambda _: 1, 1))


def test_the_bits_of_a_window_are_the_tensors_own_memory() -> None:
    base = tiny_state()
    part = TensorPart(base["a.long"][1 << 14 :], base["a.long"].shape, 1 << 14)
    assert tensor_bits("a.long", part).address == base["a.long"].ctypes.data + (2 << 14)
