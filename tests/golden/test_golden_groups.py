"""Every codec decodes the golden delta files of version 3 to the recorded states, and still writes the same bytes."""

from __future__ import annotations

import json

import pytest
from blake3 import blake3
from decoding import check_decoding
from make import CASES, HERE, facts, read_state, training_step
from make_groups import GROUPS, MANIFEST, MORE_CASES
from make_parts import CUTS, part
from support import CODECS, bits_of, changes_of, split_delta

import deltawire
from deltawire.codec import using_codec
from deltawire.delta.inspect import inspect_delta
from deltawire.dtypes import PAYLOAD_TYPES

GOLDEN = json.loads(MANIFEST.read_text(encoding="utf-8"))
PARTS = [f"part-{number}" for number in range(len(CUTS) - 1)]
NAMES = [case.__name__ for case in [*CASES, *MORE_CASES]]


def base_of(name):
    place = GROUPS if name in [case.__name__ for case in MORE_CASES] else HERE
    return read_state(place / f"{name}.base.safetensors", GOLDEN[name]["tied"])


def delta_of(name):
    return (GROUPS / f"{name}.delta").read_bytes()


def test_the_files_are_those_of_the_cases():
    assert list(GOLDEN) == [*NAMES, *PARTS]
    bases = {f"{case.__name__}.base.safetensors" for case in MORE_CASES}
    assert {path.name for path in GROUPS.iterdir()} == bases | {MANIFEST.name} | {f"{name}.delta" for name in GOLDEN}
    assert sum(path.stat().st_size for path in GROUPS.iterdir()) < 200_000


@pytest.mark.parametrize("name", [*NAMES, *PARTS])
def test_golden_deltas_are_untouched(name):
    assert blake3(delta_of(name)).hexdigest() == GOLDEN[name]["delta"]
    assert delta_of(name)[:8] == b"dwdelta3"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", NAMES)
def test_golden_deltas_decode_to_what_is_on_record(name, codec):
    golden, delta = GOLDEN[name], delta_of(name)
    split = split_delta(delta)
    assert [split.before.hex(), split.after.hex()] == [golden["before"], golden["after"]]
    check_decoding(codec, lambda: base_of(name), delta, golden)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", NAMES)
def test_encoders_still_write_the_golden_bytes(name, codec):
    new = base_of(name)
    deltawire.apply_delta(new, delta_of(name))
    with using_codec(codec):
        for threads in (1, 2):
            assert deltawire.encode_delta(base_of(name), new, threads=threads) == delta_of(name)


@pytest.mark.parametrize("codec", CODECS)
def test_golden_deltas_of_parts_lead_to_what_is_on_record(codec):
    state, new, _ = training_step()
    with using_codec(codec):
        for number in (2, 0, 1):
            delta = delta_of(PARTS[number])
            assert deltawire.encode_delta(part(state, number), part(new, number)) == delta
            deltawire.apply_delta(state, delta)
    assert facts(state) == GOLDEN["training_step"]["result"]


@pytest.mark.parametrize("case", MORE_CASES, ids=lambda case: case.__name__)
def test_cases_are_made_as_they_were(case):
    base, new, _ = case()
    assert bits_of(base) == bits_of(base_of(case.__name__))
    assert facts(new) == GOLDEN[case.__name__]["result"]


def test_the_set_covers_every_type_mode_and_change_of_structure():
    payloads = [payload for name in NAMES for payload in inspect_delta(delta_of(name)).payloads]
    assert {payload.dtype for payload in payloads} == {kind.name for kind in PAYLOAD_TYPES}
    modes, values = (
        {label for payload in payloads for label, count in getattr(payload, kind).items() if count} for kind in ("modes", "values")
    )
    assert modes == {"coded", "raw"}  # same chunks come only between blocks, which take 1,024 tiles
    assert values == {"unit", "runs", "direct", "symbols", "raw"}
    assert any(payload.name is not None for payload in payloads)
    assert {kind for name in NAMES for kind in changes_of(delta_of(name))} == {"added", "removed", "aliases"}
