"""Every codec decodes the golden deltas of parts (docs/format.md §7) to the recorded states."""

from __future__ import annotations

import json

import pytest
from blake3 import blake3
from make import HERE, MANIFEST, facts, training_step
from make_parts import CUTS, part
from old_deltas import encode_old, split_old
from support import CODECS

import deltawire
from deltawire.codec import using_codec

GOLDEN = json.loads(MANIFEST.read_text(encoding="utf-8"))["training_step"]
HASHES = [
    "96303e207371ee90c7bfcb717970797c3cc0b9d24b23a94cc2364b054a0cca7c",
    "77deb692e4fda08dd2cc16d67f6ad307ffb4ad38ec818f2c1d8f6d0ad6bd3609",
    "c815d04f7b21b2061c4f9072ce1eea262f711831e3a9ce1751547f4ce5a233bf",
]


def delta_of(number):
    return (HERE / "parts" / f"{number}.delta.safetensors").read_bytes()


def test_golden_deltas_of_parts_are_untouched():
    assert [blake3(delta_of(number)).hexdigest() for number in range(len(CUTS) - 1)] == HASHES
    for number in range(len(CUTS) - 1):
        metadata, _, _ = split_old(delta_of(number))
        assert metadata["deltawire"] == "delta/2"
        assert json.loads(metadata["parts"]) == {"model.weight": CUTS[number : number + 2]}


@pytest.mark.parametrize("codec", CODECS)
def test_golden_deltas_of_parts_lead_to_what_is_on_record(codec):
    state, new, _ = training_step()
    with using_codec(codec):
        for number in (2, 0, 1):
            assert encode_old(part(state, number), part(new, number)) == delta_of(number)
            deltawire.apply_delta(state, delta_of(number))
        assert facts(state) == GOLDEN["result"]
        assert deltawire.state_digest(state).hex() == GOLDEN["after"]
