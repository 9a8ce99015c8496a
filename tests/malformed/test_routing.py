"""Readers refuse hostile routed experts in a rollout file with a named error, and take no memory on its word."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load
from test_rollouts import GOOD, refuse

from deltawire.dtypes import dtype_of_numpy
from deltawire.errors import CorruptRollouts, UnsupportedVersion
from deltawire.format.rollouts import _ROUTED_DTYPES, RolloutLimits, Rollouts, sequences_of
from deltawire.format.routing import Routing, RoutingLayout
from deltawire.format.safetensors_header import build_header, place_in_order

LAYOUT = RoutingLayout(experts=12, top_k=3, layers=(1, 2, 5))
SEQUENCES = sequences_of(GOOD.prompts, GOOD.completions)


def experts(seed: int = 0) -> list[Any]:
    """Return rows of which the last token of each completion has none, and equal rows for equal prompts."""
    chance = np.random.default_rng(seed)
    rows = [
        np.argsort(chance.random((end - start, 3, 12)), -1)[..., :3]
        for start, end in zip(SEQUENCES.starts, SEQUENCES.starts[1:], strict=False)
    ]
    rows[2][:3] = rows[0][:3]
    for each in rows:
        each[-1] = -1
    return rows


ROWS = experts()
ROUTED = replace(GOOD, routing=Routing.encode(LAYOUT, SEQUENCES, ROWS))
DATA = ROUTED.to_bytes()


def changed(edit: Callable[[dict[str, Any], dict[str, Any]], object]) -> bytes:
    length = int.from_bytes(DATA[:8], "little")
    facts = json.loads(json.loads(DATA[8 : 8 + length])["__metadata__"]["facts"])
    tensors = {name: array.copy() for name, array in load(DATA).items()}
    edit(tensors, facts)
    order = [name for name in _ROUTED_DTYPES if name in tensors]
    placed = place_in_order([(name, dtype_of_numpy(tensors[name].dtype), tensors[name].shape) for name in order])
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return build_header(placed, {"facts": text}) + b"".join(tensors[name].tobytes() for name, _ in placed)


def test_a_file_with_routing_comes_back_as_it_was_written() -> None:
    back = Rollouts.parse(DATA)
    assert back.to_bytes() == DATA == changed(lambda tensors, facts: None)
    assert back.routing is not None
    assert back.routing.layout == LAYOUT
    assert back.routing.broken == 0
    assert back.routing.arrays["routing_shared"].tolist() == [0, 0, 3]
    for found, given_rows in zip(back.routing.experts(), ROWS, strict=True):
        assert np.array_equal(found, np.sort(given_rows, -1))


def test_a_file_without_routing_is_of_version_1() -> None:
    assert b'\\"version\\":1' in GOOD.to_bytes()
    assert b'\\"version\\":2' in DATA
    assert Rollouts.parse(GOOD.to_bytes()).routing is None


def test_broken_rows_are_counted_and_never_come_back() -> None:
    rows = [each.copy() for each in ROWS]
    rows[0][0, 1] = 0  # as engines give them that did not record anything
    rows[0][1, 0] = [4, 7, 4]
    rows[1][1, 2] = [3, -1, 5]
    routing = Routing.encode(LAYOUT, SEQUENCES, rows)
    assert routing.broken == 3
    back = Rollouts.parse(replace(GOOD, routing=routing).to_bytes()).routing
    assert back is not None
    assert back.broken == 3
    found = back.experts()
    for completion, token, layer in ((0, 0, 1), (0, 1, 0), (1, 1, 2)):
        assert found[completion][token, layer].tolist() == [-1, -1, -1]
        rows[completion][token, layer] = -1
    assert all(np.array_equal(one, np.sort(other, -1)) for one, other in zip(found, rows, strict=True))


def test_rows_of_zeros_are_right_if_tokens_go_to_one_expert() -> None:
    layout = RoutingLayout(4, 1, (0,))
    rows = [np.zeros((int(size), 1, 1), np.int64) for size in np.diff(SEQUENCES.starts)]
    routing = Routing.encode(layout, SEQUENCES, rows)
    assert routing.broken == 0
    assert all(not found.any() for found in routing.experts())


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        (LAYOUT, [np.full_like(each, 12) for each in ROWS]),
        (LAYOUT, [np.full_like(each, -2) for each in ROWS]),
        (LAYOUT, [each[:-1] for each in ROWS]),
        (LAYOUT, [each[:, :2] for each in ROWS]),
        (LAYOUT, [each[..., :2] for each in ROWS]),
        (LAYOUT, [each.astype(float) for each in ROWS]),
        (LAYOUT, ROWS[:2]),
        (RoutingLayout(2000, 3, (1, 2, 5)), ROWS),
        (RoutingLayout(12, 13, (1, 2, 5)), ROWS),
        (RoutingLayout(12, 3, (1, 5, 2)), ROWS),
        (RoutingLayout(12, 3, ()), ROWS),
    ],
)
def test_rows_that_do_not_fit_the_model_are_not_written(layout: RoutingLayout, rows: Any) -> None:
    with pytest.raises(ValueError, match=r"rout|argument"):
        Routing.encode(layout, SEQUENCES, rows)


def _routing(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], object]:
    return lambda tensors, facts: facts["routing"].update(changes)


def _set(name: str, index: Any, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], object]:
    return lambda tensors, facts: tensors[name].__setitem__(index, value)


def _tensor(name: str, edit: Callable[[Any], Any]) -> Callable[[dict[str, Any], dict[str, Any]], object]:
    return lambda tensors, facts: tensors.__setitem__(name, edit(tensors[name]))


LIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "no experts": _routing(experts=0),
    "more experts than its codes": _routing(experts=13),
    "too many experts": _routing(experts=10**9),
    "no top_k": _routing(top_k=0),
    "another top_k": _routing(top_k=2),
    "more than all experts": _routing(top_k=13),
    "layers that do not rise": _routing(layers=[1, 5, 2]),
    "a layer twice": _routing(layers=[1, 1, 2]),
    "a layer below 0": _routing(layers=[-1, 1, 2]),
    "a layer that is no number": _routing(layers=["1", 2, 3]),
    "a layer that is true": _routing(layers=[True, 2, 3]),
    "a layer too few": _routing(layers=[1, 2]),
    "no layers": _routing(layers=[]),
    "more layers than a file may have": _routing(layers=list(range(2000))),
    "more broken rows than rows": _routing(broken=10**6),
    "broken rows below 0": _routing(broken=-1),
    "a field too many": _routing(more=1),
    "a field too few": lambda tensors, facts: facts["routing"].pop("broken"),
    "routing that is no object": lambda tensors, facts: facts.update(routing=[1]),
    "no routing": lambda tensors, facts: facts.pop("routing"),
    "version 1": lambda tensors, facts: facts.update(version=1),
    "a tensor too few": lambda tensors, facts: tensors.pop("routing_codes"),
    "a stream too few": _tensor("routing_ends", lambda array: array[:-1]),
    "a stream that ends before it begins": _set("routing_ends", 0, 10**6),
    "a stream that ends below 0": _set("routing_ends", 0, -1),
    "data after the last stream": _tensor("routing_data", lambda array: np.append(array, np.uint8(0))),
    "no data": _tensor("routing_data", lambda array: array[:0]),
    "a completion too few": _tensor("routing_shared", lambda array: array[:-1]),
    "a copy of a completion that is not there": _set("routing_shared", 0, 1),
    "a copy of other tokens": _set("routing_shared", 2, 5),
    "a copy of fewer than no tokens": _set("routing_shared", 2, -1),
    "a copy too few": _set("routing_shared", 2, 2),
    "runs that cover too little": _set("routing_runs", 0, 1),
    "a run below 0": _tensor("routing_runs", lambda array: np.array([array.sum() + 1, -1], np.int32)),
    "a run of nothing": _tensor("routing_runs", lambda array: np.array([*array, 0], np.int32)),
    "runs that sum up by overflow": _tensor("routing_runs", lambda array: np.array([2**31 - 1, 2**31 - 1, array.sum() + 2], np.int32)),
    "runs that say that all rows are there": _tensor("routing_runs", lambda array: np.array([array.sum()], np.int32)),
    "an order of one layer": _tensor("routing_order", lambda array: np.arange(12, dtype=np.uint8)),
    "an order that has an expert twice": _tensor("routing_order", lambda array: np.zeros(36, np.uint8)),
    "a code that is too long": _set("routing_codes", 0, 0xCC),
    "codes that are not complete": _set("routing_codes", slice(None), 0x22),
    "no codes": _set("routing_codes", slice(None), 0),
    "a code too few": _tensor("routing_codes", lambda array: array[:-1]),
}


@pytest.mark.parametrize("lie", LIES)
def test_routing_that_contradicts_itself_is_refused(lie: str) -> None:
    data = changed(LIES[lie])
    assert data != DATA
    refuse(data)


def test_a_file_cut_short_anywhere_is_refused() -> None:
    for length in range(0, len(DATA), 7):
        refuse(DATA[:length])


def test_any_bit_of_the_data_that_flips_is_refused_or_leaves_a_file_that_is_one() -> None:
    header = 8 + int.from_bytes(DATA[:8], "little")
    silent = 0
    for index in range(header, len(DATA)):
        flipped = bytearray(DATA)
        flipped[index] ^= 1 << index % 8
        with contextlib.suppress(CorruptRollouts, UnsupportedVersion):
            back = Rollouts.parse(bytes(flipped))
            assert back.to_bytes() == flipped
            assert back.routing is not None
            for rows in back.routing.experts():
                assert ((rows == -1).all(-1) | (np.diff(rows, axis=-1) > 0).all(-1)).all()
                assert rows.max() < 12
            silent += 1
    assert silent


@given(st.integers(0, len(DATA) - 1), st.binary(min_size=1, max_size=8))
def test_a_patch_anywhere_is_refused_or_leaves_a_file_that_is_one(index: int, patch: bytes) -> None:
    data = (DATA[:index] + patch + DATA[index + len(patch) :])[: len(DATA)]
    with contextlib.suppress(CorruptRollouts, UnsupportedVersion):
        assert Rollouts.parse(data).to_bytes() == data


def test_a_file_with_more_ids_than_a_limit_is_refused() -> None:
    assert Rollouts.parse(DATA, RolloutLimits(routing_ids=SEQUENCES.tokens.size * 9)).routing is not None
    assert "ids" in refuse(DATA, RolloutLimits(routing_ids=SEQUENCES.tokens.size * 9 - 1))


def test_claims_of_many_ids_cost_no_memory() -> None:
    many = changed(lambda tensors, facts: facts["routing"].update(experts=1024, top_k=32, layers=list(range(1000))))
    prompt = np.zeros(3_000_000, np.int32)
    long = replace(GOOD, prompts=(prompt, GOOD.prompts[1])).to_bytes()
    tracemalloc.start()
    try:
        refuse(many)
        with pytest.raises(CorruptRollouts, match="tokens"):
            sequences_of(Rollouts.parse(long).prompts, GOOD.completions)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
