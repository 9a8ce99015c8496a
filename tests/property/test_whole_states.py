"""Deltas of whole states are exact: tensors are added, removed, retyped, reshaped or tied, and have any memory layout and name."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_tensors import noise
from support import CODECS, bits_of, changes_of, copied, run_python, split_delta
from thorough import examples

import deltawire
from deltawire.codec import using_codec
from deltawire.dtypes import DTYPES, dtype_named
from deltawire.errors import TensorsTied

SHAPES = [(), (0,), (1,), (0, 3), (3, 0), (5,), (2, 3), (1, 1, 7), (64,), (3, 5, 7), (257,)]


def check(base, new, make=None) -> bytes:
    """Encode and apply with every codec. The delta is applied to a copy of the base, or to what `make` returns."""
    deltas = set()
    for codec in CODECS:
        with using_codec(codec):
            deltas.add(deltawire.encode_delta(base, new))
            (delta,) = deltas
            state = make() if make else copied(base)
            patch = deltawire.resolve_delta(state, delta)
            assert bits_of(state) == bits_of(base)
            deltawire.apply_delta(state, delta)
            assert bits_of(state) == bits_of(new)
            assert deltawire.state_digest(state) == patch.after == deltawire.state_digest(new)
            assert deltawire.state_digest(base) + (patch.after - patch.before) == patch.after
            state = make() if make else copied(base)
            for _ in range(2):
                patch.apply(state)
                assert bits_of(state) == bits_of(new)
    return delta


def random_array(seed, dtype, shape):
    rng = np.random.default_rng(seed)
    return noise(rng, dtype, int(np.prod(shape))).view(dtype.numpy).reshape(shape)


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
arrays = st.builds(random_array, st.integers(0, 2**32 - 1), st.sampled_from(DTYPES), st.sampled_from(SHAPES))
states = st.dictionaries(names, arrays, max_size=6)


def changed_a_bit(array, seed):
    new = array.copy()
    flat = new.reshape(-1).view(np.uint8)
    if flat.size:
        flat[seed % flat.size] ^= 1 << seed % 8
    return new


@examples(60)
@given(data=st.data())
def test_any_state_becomes_any_other(data):
    base = data.draw(states, label="base")
    new = {}
    for name, array in base.items():
        fate = data.draw(st.sampled_from(["stays", "changes", "vanishes", "is replaced"]))
        if fate == "stays":
            new[name] = array.copy()
        elif fate == "changes":
            new[name] = changed_a_bit(array, data.draw(st.integers(0, 10_000)))
        elif fate == "is replaced":
            new[name] = data.draw(arrays)
    new |= data.draw(states, label="appearing")
    changes = changes_of(check(base, new))
    replaced = {n for n in base.keys() & new.keys() if (base[n].dtype, base[n].shape) != (new[n].dtype, new[n].shape)}
    assert changes.get("added", {}).keys() == (new.keys() - base.keys()) | replaced
    assert changes.get("removed", []) == sorted((base.keys() - new.keys()) | replaced)


@examples(20)
@given(data=st.data())
def test_the_order_of_names_does_not_matter(data):
    base, new = data.draw(states), data.draw(states)
    delta = deltawire.encode_delta(base, new)
    digest = deltawire.state_digest(base)
    shuffled_base = dict(data.draw(st.permutations(list(base.items()))))
    shuffled_new = dict(data.draw(st.permutations(list(new.items()))))
    assert deltawire.encode_delta(shuffled_base, shuffled_new) == delta
    assert deltawire.state_digest(shuffled_base) == digest


def test_equal_states_give_a_delta_without_payloads():
    base = {"x": np.arange(5.0), "empty": np.zeros((0, 4)), "scalar": np.array(np.nan)}
    split = split_delta(check(base, copied(base)))
    assert (split.changes, split.groups) == (b"", {})
    assert split.before == split.after
    check({}, {})
    check({}, base)
    check(base, {})


def test_nans_and_zeros_are_compared_by_bits():
    nans = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800001], np.uint32).view(np.float32)
    base = {"x": nans, "y": nans.copy()}
    delta = check(base, {"x": nans.copy(), "y": nans[::-1].copy()})
    assert deltawire.resolve_delta(base, delta).changed.keys() == {"y"}
    check({"x": np.zeros(3)}, {"x": -np.zeros(3)})


def test_states_with_equal_bits_may_differ():
    x = np.arange(12, dtype=np.uint16)
    alike = [{"x": x}, {"y": x}, {"x": x.view(np.float16)}, {"x": x.view(np.int16)}, {"x": x.reshape(3, 4)}, {"x": x.reshape(4, 3)}, {}]
    assert len({deltawire.state_digest(state) for state in alike}) == len(alike)
    for base in alike:
        for new in alike:
            check(base, new)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/",
        ".",
        "+ x",
        "+ ",
        " ",
        "a b",
        "\n\r\t",
        "\0",
        "\x7f\x1b[31m",
        '"',
        "\\",
        '\\"},{',
        "{}",
        "null",
        "__metadata__ ",
        "deltawire",
        "changes",
        "ключ",
        "重み",
        "🧊",
        "e\u0301",
        "\u202e",
        "\ufeff",
        "\uffff",
        "\U0010ffff",
        "x" * 100_000,
    ],
    ids=lambda name: ascii(name[:20]),
)
def test_any_legal_name_works(name):
    x = np.arange(40, dtype=np.float32)
    base = {"x": x, name: x * 2, "+ y": x * 5}
    changed, added, removed = copied(base), copied(base) | {"other" + name: x, "y": x * 7, "z": x * 8}, {"x": x}
    changed[name][7] = -1
    added["+ y"][3] = -1
    check(base, changed)
    check(base, added)
    check(base, removed)
    check(removed, base)
    tied = {name: x, "x": x}
    new = x.copy()
    new[3] = 9
    check(tied, {name: new, "x": new})


# Memory layouts


LAYOUTS = {
    "transposed": lambda a: a.T.copy().T,
    "Fortran order": lambda a: np.asfortranarray(a),
    "every second": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "backwards": lambda a: a[..., ::-1].copy()[..., ::-1],
    "all backwards": lambda a: a[::-1, ::-1].copy()[::-1, ::-1],
    "inner slice": lambda a: np.pad(a.view(f"u{a.itemsize}"), 3)[3:-3, 3:-3].view(a.dtype),
    "unaligned": lambda a: unaligned(a),
    "big steps": lambda a: np.repeat(np.repeat(a, 3, axis=0), 5, axis=1)[::3, ::5],
    "four dimensions": lambda a: a.reshape(a.shape[0], 1, a.shape[1], 1).transpose(3, 2, 1, 0).copy().transpose(3, 2, 1, 0),
    "subclass": lambda a: a.copy().view(np.matrix) if a.dtype.isbuiltin == 1 else a.copy(),
    "memory map": lambda a: np.frombuffer(bytearray(a.tobytes()), a.dtype).reshape(a.shape),
}


def unaligned(array):
    memory = np.zeros(array.nbytes + 1, np.uint8)
    view = memory[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


@pytest.mark.filterwarnings("default::PendingDeprecationWarning")  # np.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.bfloat16, np.float32, np.float64])
def test_any_memory_layout_works(layout, dtype):
    rng = np.random.default_rng(2)
    base = np.clip(rng.standard_normal((130, 140)) * 30, -127, 127).astype(dtype)
    new = base.copy()
    new.view(f"u{base.itemsize}").reshape(-1)[rng.integers(0, base.size, 900)] += 1
    change = LAYOUTS[layout]
    plain = check({"x": base}, {"x": new})
    keep = base.ndim == change(base).ndim
    if keep:
        assert check({"x": change(base)}, {"x": change(new)}, lambda: {"x": change(base)}) == plain
        assert check({"x": base}, {"x": change(new)}, lambda: {"x": change(base)}) == plain
    else:
        check({"x": change(base)}, {"x": change(new)}, lambda: {"x": change(base)})


@examples(30)
@given(data=st.data())
def test_any_view_of_a_larger_array_works(data):
    memory = random_array(data.draw(st.integers(0, 99)), data.draw(st.sampled_from(DTYPES)), (9, 8, 7))
    index = tuple(
        slice(data.draw(st.integers(0, 3)), data.draw(st.integers(4, size)), data.draw(st.sampled_from([1, 2, 3])))
        if data.draw(st.booleans())
        else slice(None, None, data.draw(st.sampled_from([-1, 1, -2])))
        for size in memory.shape
    )
    axes = data.draw(st.permutations(range(3)))

    def view(whole):
        return {"x": whole[index].transpose(axes)}

    base = view(memory)
    new = {"x": changed_a_bit(base["x"], data.draw(st.integers(0, 10_000)))}
    whole = memory.copy()
    deltawire.apply_delta(view(whole), check(base, new))
    expected = memory.copy()
    view(expected)["x"][...] = new["x"]
    assert whole.tobytes() == expected.tobytes()  # the memory around the view has not changed


# Tied tensors


def tied(array, *more):
    return dict.fromkeys(["embed", "head", *more], array)


def test_tied_tensors_are_stored_once_and_reach_tied_and_untied_states():
    rng = np.random.default_rng(4)
    old = rng.standard_normal((40, 50)).astype(ml_dtypes.bfloat16)
    new = old.copy()
    new.view(np.uint16)[::3] += 1
    single = len(deltawire.encode_delta({"embed": old}, {"embed": new}))
    delta = deltawire.encode_delta(tied(old, "third"), tied(new, "third"))
    assert changes_of(delta) == {"aliases": {"head": "embed", "third": "embed"}}
    assert list(split_delta(delta).groups) == [32 + dtype_named("BF16").code]
    assert len(delta) < single + 300
    expected = bits_of(tied(new, "third"))
    for codec in CODECS:
        with using_codec(codec):
            check_both_ways(lambda: tied(old.copy(), "third"), delta, expected)
            check_both_ways(lambda: copied(tied(old, "third")), delta, expected)
            check_both_ways(lambda: tied(old.copy()) | {"third": old.copy()}, delta, expected)


def check_both_ways(make, delta, expected):
    state = make()
    arrays = dict(state)
    deltawire.apply_delta(state, delta)
    assert bits_of(state) == expected
    assert all(state[name] is array for name, array in arrays.items())
    state = make()
    patch = deltawire.resolve_delta(state, delta)
    for _ in range(2):
        patch.apply(state)
        assert bits_of(state) == expected


def test_tied_tensors_that_do_not_change_have_no_payload():
    old, other = np.arange(9.0), np.arange(3.0)
    delta = check(tied(old) | {"x": other}, tied(old) | {"x": other + 1})
    assert changes_of(delta) == {"aliases": {"head": "embed"}}
    assert list(split_delta(delta).groups) == [dtype_named("F64").code]


def test_tensors_tied_in_one_state_only_are_stored_separately():
    old, new = np.arange(9.0), np.arange(9.0)
    new[4] = -1
    for base, after in [(tied(old), copied(tied(new))), (copied(tied(old)), tied(new))]:
        assert changes_of(check(base, after)) == {}


def test_tied_tensors_cannot_get_different_values_in_place():
    old, new = np.arange(9.0), np.arange(9.0)
    new[4] = -1
    delta = deltawire.encode_delta(tied(old), {"embed": new, "head": old.copy()})
    state = tied(old.copy())
    with pytest.raises(TensorsTied, match=r"'embed' and 'head' share memory in this state, but the delta changes only 'embed'\. .*copy"):
        deltawire.apply_delta(state, delta)
    assert bits_of(state) == bits_of(tied(old))
    delta = deltawire.encode_delta(tied(old), {"embed": new, "head": new + 1})
    with pytest.raises(TensorsTied, match="in different ways"):
        deltawire.apply_delta(state, delta)
    assert bits_of(state) == bits_of(tied(old))


def test_a_delta_of_separate_equal_copies_changes_a_tied_state():
    """A cast makes two copies of one memory, but a reader may hold both tensors in one memory."""
    old = np.arange(9.0)
    new = old.copy()
    new[4] = -1
    delta = deltawire.encode_delta(copied(tied(old)), copied(tied(new)))
    for codec in CODECS:
        with using_codec(codec):
            state = tied(old.copy())
            deltawire.apply_delta(state, delta)
            assert state["embed"] is state["head"]
            assert bits_of(state) == bits_of(tied(new))


def test_views_of_one_memory_with_other_shapes_are_not_tied():
    old = np.arange(12.0)
    base, new = {"x": old, "y": old.reshape(3, 4)}, {"x": old + 1, "y": (old + 1).reshape(3, 4)}
    assert changes_of(check(base, new)) == {}


def test_a_tied_tensor_may_be_removed_or_added():
    old, new = np.arange(9.0), np.arange(9.0) + 1
    check(tied(old, "third"), tied(new))
    check(tied(old), tied(new, "third"))
    check({"x": old}, tied(new) | {"x": new})


def test_a_patch_applied_to_two_states_shares_no_memory_between_them():
    x = np.arange(9.0)
    patch = deltawire.resolve_delta({"x": x}, deltawire.encode_delta({"x": x}, {"x": x, "y": x + 1}))
    one, two = {"x": x.copy()}, {"x": x.copy()}
    patch.apply(one)
    patch.apply(two)
    one["y"][0] = 7
    assert bits_of(two) == bits_of({"x": x, "y": x + 1})


# Memory


MEMORY = """
import resource, sys
import numpy as np, ml_dtypes
import deltawire

density, what = float(sys.argv[1]), sys.argv[2]
rng = np.random.default_rng(0)
weights = (rng.standard_normal(1 << 24, np.float32) * np.float32(0.02)).astype(ml_dtypes.bfloat16)
changes = (rng.random(1 << 21, np.float32) < density).astype(np.uint16)
base, new = {}, {}
for i in range(8):
    name = f"layer {i}"
    base[name] = weights.copy()
    new[name] = weights.copy()
    for part in np.split(new[name].view(np.uint16), 8):
        part += changes
del weights

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def grown(call):
    # The peak is that of the whole process. Allocate up to it first, so that additional memory shows.
    import ctypes
    ctypes.CDLL(None).malloc_trim(0)
    now = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
    filler = np.ones(max(peak() - now, 0) + (1 << 20), np.uint8)
    before = peak()
    result = call()
    return peak() - before, result

if what == "encode":
    used, delta = grown(lambda: deltawire.encode_delta(base, new))
else:
    delta = deltawire.encode_delta(base, new)
    used, _ = grown(lambda: deltawire.apply_delta(base, delta))
    assert all(base[name].tobytes() == new[name].tobytes() for name in base)
print(used, len(delta))
"""


@pytest.mark.parametrize(("density", "what"), [(0.01, "encode"), (0.01, "apply"), (0.1, "apply")])
def test_beyond_its_inputs_a_call_needs_64_mib_and_twice_the_delta(density, what):
    used, delta = map(int, run_python(MEMORY, str(density), what).split())
    assert used <= (64 << 20) + 2 * delta
