"""Processes that hold only their own shards write deltas of parts of tensors (docs/format.md §6)."""

from __future__ import annotations

import numpy as np
import pytest
from blake3 import blake3
from old_deltas import encode_old, join_old, split_old
from safetensors.numpy import save_file
from support import CODECS, bits_of, copied, join_delta, split_delta, varint

import deltawire
from deltawire.codec import using_codec
from deltawire.delta.prepared import PreparedUpdate
from deltawire.dtypes import DTYPES
from deltawire.errors import BaseMismatch, CorruptDelta, ShapeMismatch, StateNotWritable, TensorMissing, UnsupportedTensor
from deltawire.format import delta_file
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.format.digest import Digest, TensorKeys
from deltawire.subscribe.mirror.checkpoint_in_place import CheckpointInPlace
from deltawire.tensors.bits import TensorPart, tensor_bits


def random_state(seed, shapes=None):
    random = np.random.default_rng(seed)
    shapes = shapes or {f"{dtype.name}": (41, 73) for dtype in DTYPES}
    types = {name: next((dtype for dtype in DTYPES if dtype.name == name), DTYPES[9]) for name in shapes}
    return {
        name: random.integers(0, 2 if name == "BOOL" else 256, (*shape, types[name].itemsize), np.uint8)
        .reshape(-1).view(types[name].numpy).reshape(shape)
        for name, shape in shapes.items()
    }  # fmt: skip


def changed_state(state, seed):
    random = np.random.default_rng(seed)
    new = copied(state)
    for name, array in new.items():
        if array.size:
            flat = tensor_bits(name, array).bits.reshape(-1)
            flat[random.integers(0, flat.size, 1 + flat.size // 50)] ^= 1
    return new


def parts_of(state, number, count):
    """Return the `number`-th of `count` ranges of every tensor."""
    parts = {}
    for name, array in state.items():
        block = 512 // array.itemsize
        cuts = [min(array.size, -(-array.size * i // count // block) * block) for i in range(count)] + [array.size]
        start, stop = cuts[number : number + 2]
        parts[name] = TensorPart(array.reshape(-1)[start:stop], array.shape, start if start < stop else 0)
    return parts


def tags(state):
    return TensorKeys.of((name, tensor_bits(name, array).dtype, array.shape) for name, array in state.items()).tag()


def deltas_of(base, new, count):
    return [deltawire.encode_delta(parts_of(base, i, count), parts_of(new, i, count)) for i in range(count)]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", [1, 3, 7])
def test_digests_of_parts_and_the_tags_add_up_to_the_digest_of_the_state(codec, count):
    state = random_state(1)
    with using_codec(codec):
        total = tags(state)
        for number in range(count):
            total += deltawire.state_digest(parts_of(state, number, count))
        assert total == deltawire.state_digest(state)


@pytest.mark.parametrize("codec", CODECS)
def test_deltas_of_parts_lead_to_the_next_state_in_any_order(codec):
    base = random_state(1)
    new = changed_state(base, 2)
    with using_codec(codec):
        deltas = deltas_of(base, new, 3)
        state, difference = copied(base), Digest()
        for delta in reversed(deltas):
            deltawire.apply_delta(state, delta)
            file = delta_file.parse(delta)
            difference += file.after - file.before
        assert bits_of(state) == bits_of(new)
        assert deltawire.state_digest(base) + difference == deltawire.state_digest(new)


def test_deltas_of_parts_are_prepared_together_and_reverted():
    base = random_state(1)
    new = changed_state(base, 2)
    state, update = copied(base), PreparedUpdate()
    for delta in deltas_of(base, new, 3):
        update.add(state, delta)
    assert bits_of(state) == bits_of(base)
    update.apply()
    assert bits_of(state) == bits_of(new)
    update.revert()
    assert bits_of(state) == bits_of(base)


def test_a_patch_of_parts_has_indices_of_the_whole_tensor():
    base = random_state(1)
    new = changed_state(base, 2)
    state = copied(base)
    for patch in [deltawire.resolve_delta(base, delta) for delta in deltas_of(base, new, 4)]:
        patch.apply(state)
    assert bits_of(state) == bits_of(new)


def test_a_state_of_parts_is_changed_only_by_deltas_over_exactly_these_parts():
    base = random_state(1)
    new = changed_state(base, 2)
    deltas = deltas_of(base, new, 3)
    own = {name: part.copy() for name, part in parts_of(base, 1, 3).items()}
    deltawire.apply_delta(own, deltas[1])
    assert bits_of({n: p.elements for n, p in own.items()}) == bits_of({n: p.elements for n, p in parts_of(new, 1, 3).items()})
    with pytest.raises(ShapeMismatch):
        deltawire.apply_delta(own, deltas[0])


def test_parts_that_a_process_has_nothing_of_are_not_listed():
    base = random_state(1, {"a": (4,), "b": (1000,), "empty": (0, 3)})
    new = changed_state(base, 2)
    dtypes = {name: tensor_bits(name, array).dtype for name, array in base.items()}
    covered = [delta_file.parse(delta).file_parts.of(sorted(base), dtypes) for delta in deltas_of(base, new, 2)]
    assert covered == [{"a": (0, 4), "b": (0, 512)}, {"b": (512, 1000)}]


def test_the_same_elements_are_not_changed_twice():
    base = random_state(1)
    delta = deltas_of(base, changed_state(base, 2), 2)[0]
    update = PreparedUpdate()
    update.add(base, delta)
    with pytest.raises(CorruptDelta, match="same elements"):
        update.add(base, delta)


def test_the_same_elements_are_not_changed_twice_on_disk(tmp_path):
    base = random_state(1, {"a": (41, 73), "b": (5000,)})
    middle = changed_state(base, 2)
    save_file(base, tmp_path / "model.safetensors")
    files = CheckpointInPlace(tmp_path)
    for delta in deltas_of(base, middle, 2):
        files.apply(delta, 0, len(base))
    assert bits_of(Checkpoint(tmp_path)) == bits_of(middle)
    for delta in (deltas_of(middle, changed_state(middle, 3), 2)[1], deltawire.encode_delta(middle, changed_state(middle, 3))):
        with pytest.raises(CorruptDelta, match="same elements"):
            files.apply(delta, 0, len(base))
    CheckpointInPlace(tmp_path).apply(delta, 0, len(base))  # the next version


def test_a_part_of_another_state_is_refused():
    base = random_state(1)
    delta = deltas_of(base, changed_state(base, 2), 2)[1]
    with pytest.raises(BaseMismatch):
        deltawire.apply_delta(changed_state(base, 3), delta)
    with pytest.raises(BaseMismatch, match="15"):
        deltawire.apply_delta({name: array for name, array in base.items() if name != "BF16"}, delta)
    with pytest.raises(BaseMismatch, match="other names"):
        deltawire.apply_delta({name.replace("BF16", "BF17"): array for name, array in base.items()}, delta)
    with pytest.raises(ShapeMismatch):
        deltawire.apply_delta({name: array[:2] for name, array in base.items()}, delta)


def test_parts_of_tensors_that_are_not_contiguous_are_written_where_they_are_whole_rows():
    base = random_state(1, {"x": (64, 256), "y": (64, 33)})
    new = changed_state(base, 2)
    x_only, both = deltas_of({"x": base["x"]}, {"x": new["x"]}, 2), deltas_of(base, new, 2)
    turned = {"x": np.asfortranarray(base["x"])}
    for delta in x_only:
        deltawire.apply_delta(turned, delta)
    assert bits_of(turned) == bits_of({"x": new["x"]})
    turned = {name: np.asfortranarray(array) for name, array in copied(base).items()}
    with pytest.raises(StateNotWritable):
        deltawire.apply_delta(turned, both[0])
    deltawire.resolve_delta(turned, both[0]).apply(turned)


@pytest.mark.parametrize("part", [(100, 2), (0, 1001), (-256, 2)])
def test_invalid_parts_are_refused(part):
    start, size = part
    with pytest.raises(UnsupportedTensor):
        deltawire.state_digest({"x": TensorPart(np.zeros(size, np.float16), (10, 100), start)})


def test_parts_are_not_encoded_against_anything_else():
    base = random_state(1)
    for other in (base, parts_of(base, 0, 3), {**parts_of(base, 0, 2), "more": parts_of(base, 0, 2)["BF16"]}):
        with pytest.raises(UnsupportedTensor):
            deltawire.encode_delta(other, parts_of(base, 0, 2))


def parted(*parts, names=("x", "y")):
    """Return the bytes of a list of parts: (names in between, first block, elements)."""
    return blake3("\0".join(names).encode()).digest(8) + b"".join(varint(number) for part in parts for number in part)


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        (parted((0, 0, 1000), (0, 0, 3))[:-1], CorruptDelta),
        (parted((0, 0, 1000), (0, 0, 3))[:7], CorruptDelta),
        (parted((0, 0, 1000), (0, 0, 0)), CorruptDelta),
        (parted((0, 0, 1000), (1, 0, 3)), BaseMismatch),
        (parted((0, 0, 1001), (0, 0, 3)), ShapeMismatch),
        (parted((0, 1, 1000), (0, 0, 3)), ShapeMismatch),
        (parted((0, 2**39, 2**39), (0, 0, 3)), ShapeMismatch),
        (parted((0, 0, 1000), (0, 0, 3), names=("x", "z")), BaseMismatch),
        (parted((0, 0, 1000)), BaseMismatch),
        (parted(), BaseMismatch),
        (b"", BaseMismatch),
    ],
)
def test_malformed_lists_of_parts_are_refused(parts, error):
    base = random_state(1, {"x": (1000,), "y": (3,)})
    split = split_delta(deltawire.encode_delta(parts_of(base, 0, 1), parts_of(changed_state(base, 2), 0, 1)))
    assert split.parts == parted((0, 0, 1000), (0, 0, 3))
    with pytest.raises(error):
        deltawire.resolve_delta(base, join_delta(split._replace(parts=parts)))


@pytest.mark.parametrize("parts", ['{"x":[0,0]}', '{"x":[5,4]}', '{"x":[0]}', '{"x":4}', "[]", '{"x":[0,-1]}', '{"x":[0,1],"x":[0,1]}',
                                   '{"x":[0,1.0]}', '{"x":[256,300],"y":[0,3]}', '{"x":[0,1000],"y":[0,3],"z":[0,1]}'])  # fmt: skip
def test_malformed_lists_of_parts_in_old_files_are_refused(parts):
    base = random_state(1, {"x": (1000,), "y": (3,)})
    delta = encode_old(parts_of(base, 0, 1), parts_of(changed_state(base, 2), 0, 1))
    metadata, entries, data = split_old(delta)
    with pytest.raises((CorruptDelta, TensorMissing, ShapeMismatch)):
        deltawire.resolve_delta(base, join_old({**metadata, "parts": parts}, entries, data))


def test_a_part_of_an_old_file_that_is_not_aligned_is_refused():
    base = random_state(1, {"x": (1000,)})
    metadata, entries, data = split_old(encode_old(parts_of(base, 0, 1), parts_of(changed_state(base, 2), 0, 1)))
    with pytest.raises(CorruptDelta, match="not at a multiple of 512 bytes"):
        deltawire.resolve_delta(base, join_old({**metadata, "parts": '{"x":[1,1000]}'}, entries, data))
