"""Every codec decodes the golden delta files of version 1 to the recorded states."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from blake3 import blake3
from decoding import check_decoding
from make import CASES, HERE, MANIFEST, facts, read_state
from old_deltas import encode_old, split_old
from safetensors import safe_open
from support import CODECS, bits_of, copied

import deltawire
from deltawire.codec.reference import decoder, terms
from deltawire.codec.reference.payload import CODED
from deltawire.delta.inspect import inspect_delta
from deltawire.dtypes import DTYPES

GOLDEN = json.loads(MANIFEST.read_text(encoding="utf-8"))
NAMES = [case.__name__ for case in CASES]


def base_of(name):
    return read_state(HERE / f"{name}.base.safetensors", GOLDEN[name]["tied"])


def delta_of(name):
    return (HERE / f"{name}.delta.safetensors").read_bytes()


def test_the_files_are_those_of_the_cases():
    assert list(GOLDEN) == NAMES
    files = {path.name for path in HERE.glob("*.safetensors")}
    assert files == {f"{name}.{part}.safetensors" for name in NAMES for part in ("base", "delta")}
    assert sum(path.stat().st_size for path in [*HERE.glob("*.safetensors"), MANIFEST]) < 200_000


@pytest.mark.parametrize("name", NAMES)
def test_golden_deltas_are_untouched(name):
    assert blake3(delta_of(name)).hexdigest() == GOLDEN[name]["delta"]
    metadata, _, _ = split_old(delta_of(name))
    assert [metadata[key] for key in ("deltawire", "before", "after")] == ["delta/1", GOLDEN[name]["before"], GOLDEN[name]["after"]]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", NAMES)
def test_golden_deltas_decode_to_what_is_on_record(name, codec):
    check_decoding(codec, lambda: base_of(name), delta_of(name), GOLDEN[name])


@pytest.mark.parametrize("name", NAMES)
def test_the_encoder_of_old_files_in_tests_writes_the_golden_bytes(name):
    new = base_of(name)
    deltawire.apply_delta(new, delta_of(name))
    assert encode_old(base_of(name), new) == delta_of(name)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_cases_are_made_as_they_were(case):
    base, new, _ = case()
    assert bits_of(base) == bits_of(base_of(case.__name__))
    assert facts(new) == GOLDEN[case.__name__]["result"]


@pytest.mark.parametrize("name", NAMES)
def test_golden_deltas_open_as_plain_safetensors(name):
    _, _, payloads = split_old(delta_of(name))
    with safe_open(HERE / f"{name}.delta.safetensors", "np") as file:
        assert sorted(file.keys()) == sorted(payloads)
        assert file.metadata()["deltawire"] == "delta/1"
        for tensor, payload in payloads.items():
            array = file.get_tensor(tensor)
            assert (array.dtype, array.tobytes()) == (np.uint8, payload)


@pytest.mark.parametrize("name", NAMES)
def test_golden_bases_open_as_plain_safetensors(name):
    with safe_open(HERE / f"{name}.base.safetensors", "np") as file:
        assert set(file.keys()) == base_of(name).keys() - GOLDEN[name]["tied"].keys()


# The golden files cover every feature


def all_facts():
    return [inspect_delta(delta_of(name)) for name in NAMES]


def test_the_set_covers_every_type_and_mode():
    tensors = [tensor for facts in all_facts() for tensor in facts.payloads]
    assert {tensor.dtype for tensor in tensors} == {dtype.name for dtype in DTYPES}
    for kind in ("modes", "values"):
        covered = {label for tensor in tensors for label, count in getattr(tensor, kind).items() if count}
        assert covered == {"modes": {"same", "coded", "raw"}, "values": {"unit", "runs", "direct", "symbols", "raw"}}[kind]
    assert len([tensor for tensor in tensors if len(tensor.density) > 2]) == 1


def test_neighbouring_chunks_are_counted_together_if_there_are_many(monkeypatch):
    whole = [tensor for facts in all_facts() for tensor in facts.payloads]
    monkeypatch.setattr("deltawire.delta.inspect.MOST_RANGES", 2)
    merged = [tensor for facts in all_facts() for tensor in facts.payloads]
    assert max(len(tensor.density) for tensor in whole) > 2 == max(len(tensor.density) for tensor in merged)
    for one, other in zip(whole, merged, strict=True):
        assert [sum(column) for column in zip(*one.density, strict=True)] == [sum(column) for column in zip(*other.density, strict=True)]


def test_the_set_covers_every_change_of_structure():
    found = all_facts()
    for kind in ("added", "removed", "aliases"):
        assert any(getattr(facts, kind) for facts in found)
    assert any(set(facts.added) & set(facts.removed) for facts in found)
    assert any(facts.before == facts.after and not facts.payloads for facts in found)


class CountingReader(decoder.BitReader):
    """A reader that counts the codes that are escaped."""

    escaped = 0

    def lr(self, k):
        value = super().lr(k)
        self.escaped += value >> k >= 16
        return value


def only_chunk(name, tensor):
    """Return the header of the only chunk of a tensor without contexts, and how many codes of its positions and values are escaped."""
    _, _, payloads = split_old(delta_of(name))
    payload = payloads[tensor]
    word, length = struct.unpack_from("<II", payload, 1)
    assert (word >> 30, len(payload)) == (CODED, 9 + length)
    dtype = DTYPES[payload[0]]
    reader = CountingReader(payload[9:])
    assert reader.take(11) == 0
    table, ks = decoder.read_table(reader, dtype.width)
    header = decoder.read_context_header(reader, dtype.width, bool(table), 2**15)
    decoder.read_positions(reader, header, word % 2**30)
    positions, reader.escaped = reader.escaped, 0
    if header.mode == terms.SYMBOLS:
        decoder.read_xors(reader, header.n, table, ks, dtype.width)
    else:
        decoder.read_steps(reader, header, dtype.width)
    reader.finish()
    return header, positions, reader.escaped


def test_the_set_covers_inverted_contexts():
    assert only_chunk("inverted", "x")[0].u == 3
    assert only_chunk("inverted", "y")[0].u == 0
    assert only_chunk("escapes", "gaps")[0].u is None


def test_the_set_covers_escapes_of_positions_and_values():
    header, positions, values = only_chunk("escapes", "gaps")
    assert (header.mode, positions > 0, values > 0) == (terms.DIRECT, True, True)
    header, positions, values = only_chunk("escapes", "runs")
    assert (header.mode, positions, values) == (terms.RUNS, 0, 1)


def test_the_set_covers_symbol_tables():
    assert only_chunk("symbols", "x")[0].mode == terms.SYMBOLS


def test_every_golden_delta_is_refused_by_the_wrong_state():
    for name in NAMES:
        for other in NAMES:
            if other != name:
                state = base_of(other)
                before = copied(state)
                with pytest.raises(deltawire.DeltawireError):
                    deltawire.apply_delta(state, delta_of(name))
                assert bits_of(state) == bits_of(before)
