"""Canary records of versions: written once, and used only if they are sound, signed, and about this very version."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from deltawire import Publisher, SigningKey, WriterOptions
from deltawire.chain.log import ChainLog
from deltawire.chain.records.canaries import put_canary, read_canary
from deltawire.errors import CorruptRecord, DeltawireError, SignatureInvalid, UnsupportedVersion
from deltawire.format.records.canary_records import MOST_PROMPTS, MOST_TOKENS, CanaryRecord, RecordedTokens
from deltawire.format.records.version_records import Commit
from deltawire.store import keys
from deltawire.store.memory import MemoryStore

RECORDED = (RecordedTokens((1, 2, 3), (4, 5), (-0.5, -1.25)),)


class Chain:
    def __init__(self, key: SigningKey | None = None) -> None:
        self.store = MemoryStore()
        with Publisher(self.store, options=WriterOptions(signing_key=key)) as publisher:
            seqs = [publisher.publish({"w": np.full(4, number, np.float32)}).seq for number in (1, 2)]  # type: ignore[union-attr]
        self.log = ChainLog(self.store, trusted_keys=() if key is None else [key.public])
        self.commits = [commit for seq in seqs if (commit := self.log.read(seq)) is not None]

    @property
    def newest(self) -> Commit:
        return self.commits[-1]

    def replace(self, data: bytes) -> None:
        self.store.put(keys.canary_key(self.newest.seq), data)


def test_a_version_is_recorded_once() -> None:
    chain = Chain()
    assert read_canary(chain.log, chain.newest) is None
    first = put_canary(chain.log, chain.newest, RECORDED)
    assert first.recorded == RECORDED
    assert put_canary(chain.log, chain.newest, [dataclasses.replace(RECORDED[0], logprobs=(-1.0, -1.0))]) == first
    assert read_canary(chain.log, chain.newest) == first
    assert read_canary(chain.log, chain.commits[0]) is None


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda chain, record: b"{}", CorruptRecord),
        (lambda chain, record: b"x" * 70_000, CorruptRecord),
        (lambda chain, record: record.to_bytes().replace(b'"version":1', b'"version":2'), UnsupportedVersion),
        (lambda chain, record: dataclasses.replace(record, id="0" * 32).to_bytes(), CorruptRecord),
        (lambda chain, record: dataclasses.replace(record, target=chain.log.ref(chain.commits[0])).to_bytes(), CorruptRecord),
    ],
    ids=["empty", "long", "version", "run", "commit"],
)
def test_a_record_that_is_not_about_this_version_is_refused(
    change: Callable[[Chain, CanaryRecord], bytes], error: type[DeltawireError]
) -> None:
    chain = Chain()
    record = put_canary(chain.log, chain.newest, RECORDED)
    chain.replace(change(chain, record))
    with pytest.raises(error):
        read_canary(chain.log, chain.newest)
    if error is CorruptRecord:  # it does not keep a sound record out
        assert put_canary(chain.log, chain.newest, RECORDED) == read_canary(chain.log, chain.newest)
    else:
        with pytest.raises(error):
            put_canary(chain.log, chain.newest, RECORDED)


def test_readers_with_trusted_keys_need_a_signed_record() -> None:
    pytest.importorskip("cryptography")
    key, other = SigningKey.generate(), SigningKey.generate()
    chain = Chain(key)
    with pytest.raises(SignatureInvalid, match="canary record of commit"):
        put_canary(chain.log, chain.newest, RECORDED)
    assert read_canary(chain.log, chain.newest) is None
    earlier = chain.commits[0]
    record = put_canary(chain.log, earlier, RECORDED, key=key)
    assert read_canary(chain.log, earlier) == record
    forged = dataclasses.replace(record, recorded=(dataclasses.replace(RECORDED[0], tokens=(4, 6)),))
    for bad in (forged, other.sign(record)):
        chain.store.put(keys.canary_key(earlier.seq), bad.to_bytes())
        with pytest.raises(SignatureInvalid):
            read_canary(chain.log, earlier)
    assert put_canary(chain.log, earlier, RECORDED, key=key) == read_canary(chain.log, earlier)


@pytest.mark.parametrize(
    "recorded",
    [
        (),
        RECORDED * (MOST_PROMPTS + 1),
        (RecordedTokens((), (4,), (-1.0,)),),
        (RecordedTokens((1,), (), ()),),
        (RecordedTokens((1,), (4, 5), (-1.0,)),),
        (RecordedTokens((1,) * (MOST_TOKENS + 1), (4,), (-1.0,)),),
        (RecordedTokens((1,), (2**31,), (-1.0,)),),
        (RecordedTokens((-1,), (4,), (-1.0,)),),
    ],
    ids=["none", "prompts", "empty", "tokens", "log-probs", "long", "large", "negative"],
)
def test_a_record_outside_its_limits_is_neither_written_nor_read(recorded: tuple[RecordedTokens, ...]) -> None:
    chain = Chain()
    with pytest.raises(CorruptRecord):
        put_canary(chain.log, chain.newest, recorded)
    assert read_canary(chain.log, chain.newest) is None


def test_log_probs_that_are_not_numbers_are_not_recorded() -> None:
    chain = Chain()
    with pytest.raises(ValueError, match="not a number"):
        put_canary(chain.log, chain.newest, [RecordedTokens((1,), (4,), (float("nan"),))])
    record = put_canary(chain.log, chain.newest, [RecordedTokens((1,), (4, 5), (0.5, -1e9))])
    assert record.recorded[0].logprobs == (0.0, -1000.0)  # the nearest that a record can hold


def test_records_of_version_1_stay_readable() -> None:
    data = (
        b'{"deltawire":"canary","id":"0123456789abcdef0123456789abcdef","nonce":"fedcba9876543210fedcba9876543210","recorded":'
        b'[{"logprobs":[500000,1250000],"prompt":[1,2,3],"tokens":[4,5]}],"signature":null,"target":{"commit":"'
        + b"ab" * 32
        + b'","digest":"00000000000000000000000000000000","seq":7},"time":1763300000000,"version":1}'
    )
    record = CanaryRecord.parse(data)
    assert (record.target.seq, record.recorded, record.to_bytes()) == (7, RECORDED, data)
