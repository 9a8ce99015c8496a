"""All codecs give the same bytes for routed experts, decode them to the same rows, and refuse the same changed bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import CODECS

from deltawire.codec import using_codec
from deltawire.codec.routing import CodedRows, RoutingRows, decode_rows, encode_rows
from deltawire.errors import CorruptRollouts
from deltawire.format.routing import Routing, RoutingLayout, Sequences

SHAPES = [(1, 1), (2, 1), (2, 2), (8, 2), (9, 3), (32, 4), (128, 8), (256, 8), (64, 6), (384, 8), (512, 10), (40, 17), (1024, 32)]


@st.composite
def drawn(draw: Any) -> tuple[RoutingLayout, Sequences, list[Any]]:
    """Return routing in which tokens often go where the same token went before, with missing and broken rows."""
    experts, top_k = draw(st.sampled_from(SHAPES))
    layers = draw(st.sampled_from([1, 2, 9, 33]))
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    prompts = [chance.integers(0, 5, draw(st.integers(1, 4)), np.int32) for _ in range(draw(st.integers(1, 2)))]
    completions = [
        (int(chance.integers(len(prompts))), chance.integers(0, 5, draw(st.integers(1, 6)), np.int32))
        for _ in range(draw(st.integers(1, 4)))
    ]
    sequences = Sequences.of(prompts, completions)
    homes = np.argsort(chance.random((5, layers, experts)) ** 3, axis=-1)
    stays = draw(st.sampled_from([0.0, 0.7, 1.0]))
    found: list[Any] = []
    for start, end in zip(sequences.starts, sequences.starts[1:], strict=False):
        rows = homes[sequences.tokens[start:end]].copy()
        for row in rows.reshape(-1, experts):
            if chance.random() > stays:
                chance.shuffle(row)
        rows = chance.permuted(rows[..., :top_k], axis=-1)
        rows[chance.random(rows.shape[:2]) < draw(st.sampled_from([0.0, 0.3]))] = -1
        if draw(st.booleans()):
            rows[-1] = -1
        found.append(rows.astype(draw(st.sampled_from([np.int16, np.int64]))) if draw(st.integers(0, 9)) else None)
    return RoutingLayout(experts, top_k, tuple(range(1, layers + 1))), sequences, found


@given(drawn())
def test_rows_come_back_as_ascending_sets_from_every_codec(case: tuple[RoutingLayout, Sequences, list[Any]]) -> None:
    layout, sequences, experts = case
    coded: list[Routing] = []
    for name in CODECS:
        with using_codec(name):
            coded.append(Routing.encode(layout, sequences, experts))
    for routing in coded:
        assert routing.broken == 0
        assert {name: array.tobytes() for name, array in routing.arrays.items()} == {
            name: array.tobytes() for name, array in coded[0].arrays.items()
        }
    for name in CODECS:
        with using_codec(name):
            for threads in (1, 2):
                for found, given in zip(coded[0].experts(threads=threads), experts, strict=True):
                    expected = np.full_like(found, -1) if given is None else np.sort(given, -1)
                    assert found.dtype == np.int16
                    assert np.array_equal(found, expected)


@given(drawn(), st.integers(0, 2**32))
def test_changed_bytes_are_judged_alike_by_every_codec(case: tuple[RoutingLayout, Sequences, list[Any]], seed: int) -> None:
    layout, sequences, experts = case
    routing = Routing.encode(layout, sequences, experts)
    chance = np.random.default_rng(seed)
    arrays = {name: array.copy() for name, array in routing.arrays.items()}
    name = ["routing_data", "routing_codes", "routing_ends"][chance.integers(3)]
    if not arrays[name].size:
        return
    place = chance.integers(arrays[name].size)
    arrays[name][place] ^= 1 << chance.integers(8 if name != "routing_ends" else 3)
    hostile = replace(routing, arrays=arrays)
    verdicts = []
    for codec in CODECS:
        with using_codec(codec):
            try:
                verdicts.append([rows.tobytes() for rows in hostile.experts()])
            except CorruptRollouts:
                verdicts.append(None)
    assert all(verdict == verdicts[0] for verdict in verdicts)


@pytest.mark.parametrize("codec", CODECS)
def test_rows_that_a_codec_is_given_must_fit_together(codec: str) -> None:
    """The codec checks positions itself, because wrong ones would make it read memory that is not its own."""
    none = np.full(2, -1, np.int64)
    order = np.tile(np.arange(8, dtype=np.uint16), (1, 1))
    rows = RoutingRows(8, 2, none, none, np.ones((2, 1), np.uint8), order)
    with using_codec(codec):
        coded = encode_rows(rows, np.array([[[1, 2]], [[3, 4]]], np.int16))
        assert decode_rows(rows, coded).tolist() == [[[1, 2]], [[3, 4]]]
        with pytest.raises(CorruptRollouts):
            encode_rows(rows, np.array([[[1, 8]], [[3, 4]]], np.int16))
        with pytest.raises(CorruptRollouts):
            decode_rows(rows, CodedRows(coded.lengths, coded.ends[:-1], coded.data))
        with pytest.raises(CorruptRollouts):
            decode_rows(rows, CodedRows(coded.lengths[:-1], coded.ends, coded.data))
        if codec != "reference":
            for wrong in (
                replace(rows, copied=np.array([-1, 1])),
                replace(rows, reference=np.array([0, -1])),
                replace(rows, reference=none[:1]),
                replace(rows, order=order + np.uint16(1)),
                replace(rows, top_k=9),
            ):
                with pytest.raises(ValueError, match="fit together"):
                    decode_rows(wrong, coded)


def test_copies_of_prompts_take_no_bytes() -> None:
    chance = np.random.default_rng(0)
    prompt = np.arange(200, dtype=np.int32)
    layout = RoutingLayout(128, 8, (0, 1, 2))
    rows = np.argsort(chance.random((201, 3, 128)), axis=-1)[..., :8]
    one = Routing.encode(layout, Sequences.of([prompt], [(0, prompt[:1])]), [rows])
    many = Routing.encode(layout, Sequences.of([prompt], [(0, prompt[:1])] * 8), [rows] * 8)
    assert len(many.arrays["routing_data"]) == len(one.arrays["routing_data"])
    assert all(np.array_equal(found, np.sort(rows, -1)) for found in many.experts())
