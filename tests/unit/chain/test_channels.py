"""Channels: moves are made one at a time, read only if they are sound, and tell where a rollback leads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from channelled_chain import ChannelledChain

from deltawire import SigningKey
from deltawire.chain.channels import ChannelReader, channel_names, channel_of, target_of
from deltawire.chain.find import newest_version
from deltawire.chain.log import ChainLog
from deltawire.errors import (
    ChainBroken,
    ChannelMoved,
    CorruptRecord,
    DataMissing,
    DeltawireError,
    NoChain,
    NoChannel,
    OutcomeUnknown,
    RelayConflict,
    SignatureInvalid,
    UnsupportedVersion,
    VersionUnknown,
)
from deltawire.format.records.channel_records import ChannelMove
from deltawire.format.records.record_parts import CommitRef
from deltawire.format.records.relay_records import CopyRecord
from deltawire.publish.channels import ChannelWriter, Reason
from deltawire.store import keys
from deltawire.store.memory import MemoryStore
from deltawire.testing.faulty_store import After, Before, FaultyStore, call

KEY = SigningKey.generate()
SIGNED = pytest.mark.parametrize("key", [None, KEY], ids=["unsigned", "signed"])


@SIGNED
def test_a_channel_names_the_version_of_its_newest_move(key: SigningKey | None) -> None:
    chain = ChannelledChain(key=key)
    follower = chain.reader()
    with pytest.raises(NoChannel, match="stable"):
        follower.newest()
    assert follower.has_news()
    first = chain.promote(2)
    assert follower.newest() == first
    assert (first.move, first.kind, first.before, first.target) == (0, "promote", None, chain.chain.ref(2))
    assert not follower.has_news()
    for version in range(3, 7):
        chain.promote(version)
    assert follower.has_news()
    newest = follower.newest()
    assert newest.target == chain.chain.ref(6)
    assert newest == follower.seen == chain.reader().newest()
    assert target_of(follower.log, newest, newest_version(follower.log)) == chain.chain.commits[6]
    assert [move.target.seq for move in follower.history()] == [6, 5, 4, 3, 2]


@SIGNED
def test_a_rollback_leads_to_where_the_channel_stood_before(key: SigningKey | None) -> None:
    chain = ChannelledChain(key=key)
    for version in (1, 2, 2, 4):
        chain.promote(version)
    assert [chain.rollback().target.seq for _ in range(2)] == [2, 1]
    with pytest.raises(VersionUnknown, match="no other version"):
        chain.rollback()
    chain.promote(5)
    assert chain.rollback().target.seq == 1
    chain.promote(6)
    assert chain.rollback(to=4).target.seq == 4  # it was promoted after 2
    assert chain.rollback().target.seq == 2
    assert chain.rollback(to=3).target.seq == 3  # it was never promoted, so it counts as a promotion
    assert chain.rollback().target.seq == 2


def test_a_share_belongs_to_the_channel_until_it_is_changed() -> None:
    chain = ChannelledChain()
    with pytest.raises(NoChannel):
        chain.writer("canary").set_share(1)
    assert chain.promote(2, "canary", share=50_000).share == 50_000
    assert chain.promote(3, "canary").share == 50_000
    changed = chain.writer("canary").set_share(0, reason=Reason("night", "me"))
    assert (changed.kind, changed.share, changed.target.seq, changed.why, changed.by) == ("share", 0, 3, "night", "me")
    assert chain.rollback("canary").target.seq == 2
    with pytest.raises(CorruptRecord):
        chain.writer("canary").set_share(1_000_001)
    with pytest.raises(CorruptRecord):
        chain.writer("canary").set_share(1, reason=Reason("two\nlines"))
    assert chain.reader("canary").newest().share == 0


def test_names_of_channels_are_listed() -> None:
    chain = ChannelledChain()
    assert channel_names(chain.log()) == []
    for name in ("stable", "stable-2", "canary"):
        chain.promote(1, name)
        chain.promote(2, name)
    chain.store.put("channel/x/y/0000000000.json", b"x")
    chain.store.put("channel/stable/notes.txt", b"x")
    assert channel_names(chain.log()) == ["canary", "stable", "stable-2"]
    with pytest.raises(ValueError, match="cannot name a channel"):
        ChannelReader(chain.log(), "a/b")


# Users


def test_users_stay_in_a_channel_while_its_share_grows() -> None:
    move = dataclasses.replace(ChannelledChain().promote(1, "canary"), id="0" * 32)
    users = [f"user {number}" for number in range(4000)]
    before: set[str] = set()
    for share in (0, 10_000, 250_000, 900_000, 1_000_000):
        inside = {user for user in users if channel_of(user, [dataclasses.replace(move, share=share)]) == "canary"}
        assert before <= inside
        assert abs(len(inside) / len(users) - share / 1e6) < 0.03
        before = inside


def test_the_hash_of_a_user_is_the_one_of_the_protocol() -> None:
    move = ChannelMove("0" * 32, "canary", 0, "promote", CommitRef(1, "a" * 64, None), None, 0, "", "", 0, "0" * 32)
    # blake3 of "0…0/canary/ann", first 8 bytes, little-endian, modulo a million
    place = 675_247
    assert channel_of("ann", [dataclasses.replace(move, share=place)]) is None
    assert channel_of("ann", [dataclasses.replace(move, share=place + 1)]) == "canary"
    assert channel_of("ann", [dataclasses.replace(move, share=None)]) is None
    everybody = dataclasses.replace(move, channel="beta", share=1_000_000)
    assert channel_of("ann", [dataclasses.replace(move, share=place), everybody]) == "beta"


# Two writers


def test_of_two_writers_one_wins() -> None:
    chain = ChannelledChain()
    chain.promote(1)
    slow = chain.writer(store=FaultyStore(chain.store, [Before(call("put_if_absent"), "unavailable")]))
    other = _Meanwhile(chain.store, "put_if_absent", lambda: chain.promote(3))
    with pytest.raises(ChannelMoved, match="move 1"):
        chain.writer(store=other).promote(chain.chain.commits[2])
    assert chain.reader().newest().target.seq == 3
    assert slow.promote(chain.chain.commits[4]).move == 2  # the store did not answer the first time


class _Meanwhile(FaultyStore):
    """Lets something happen before the first call of an operation."""

    def __init__(self, inner: MemoryStore, operation: str, happens: Callable[[], object]) -> None:
        super().__init__(inner)
        self._operation = operation
        self._happens: Callable[[], object] | None = happens

    def put_if_absent(self, key: str, data: bytes) -> None:
        if self._operation == "put_if_absent" and self._happens is not None:
            happens, self._happens = self._happens, None
            happens()
        super().put_if_absent(key, data)


def test_a_writer_can_insist_on_the_move_that_it_knows() -> None:
    chain = ChannelledChain()
    with pytest.raises(ChannelMoved):
        chain.writer().promote(chain.chain.commits[1], expect=0)
    first = chain.writer().promote(chain.chain.commits[1], expect=-1)
    with pytest.raises(ChannelMoved):
        chain.writer().promote(chain.chain.commits[2], expect=-1)
    chain.writer().promote(chain.chain.commits[2], expect=first.move)
    with pytest.raises(ChannelMoved, match="move 1"):
        chain.writer().rollback(expect=first.move)
    with pytest.raises(ChannelMoved, match=r"the newest move of the channel stable in .* is 1, not 7"):
        chain.writer().rollback(expect=7)
    assert chain.reader().newest().move == 1


@pytest.mark.parametrize("kind", ["unknown", "unavailable"])
def test_a_lost_answer_does_not_move_a_channel_twice(kind: str) -> None:
    chain = ChannelledChain()
    lost = FaultyStore(chain.store, [After(call("put_if_absent"), kind)])  # type: ignore[arg-type]
    made = chain.writer(store=lost).promote(chain.chain.commits[2])
    assert made == chain.reader().newest()
    assert made.move == 0


def test_a_writer_that_never_learns_the_outcome_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltawire.store.create_rule.time.sleep", lambda seconds: None)
    chain = ChannelledChain()
    deaf = FaultyStore(chain.store, [After(call(None, "channel/stable/0000000000"), "unknown", times=None)])
    writer = ChannelWriter(chain.log(deaf), "stable")
    writer._reader.newest = lambda: (_ for _ in ()).throw(NoChannel("none"))  # type: ignore[method-assign]
    with pytest.raises(OutcomeUnknown):
        writer.promote(chain.chain.commits[2])


# The writer and the target


def test_moves_of_a_signed_chain_are_signed() -> None:
    chain = ChannelledChain(key=KEY)
    with pytest.raises(SignatureInvalid, match="not signed"):
        ChannelWriter(chain.log(), "stable").promote(chain.chain.commits[1])
    with pytest.raises(SignatureInvalid, match="not trusted"):
        ChannelWriter(chain.log(), "stable", key=SigningKey.generate()).promote(chain.chain.commits[1])
    assert channel_names(chain.log()) == []


def test_only_versions_of_the_chain_are_promoted() -> None:
    chain = ChannelledChain()
    with pytest.raises(VersionUnknown):
        chain.writer().promote(chain.chain.commits[0])  # a fence
    other = ChannelledChain()
    with pytest.raises(DeltawireError):
        chain.writer().promote(other.chain.commits[3])
    assert channel_names(chain.log()) == []


def test_a_copy_has_no_channels_of_its_own() -> None:
    chain = ChannelledChain()
    chain.store.put(keys.COPY, CopyRecord(chain.chain.run.id).to_bytes())
    with pytest.raises(RelayConflict):
        chain.promote(1)


# Hostile records


@SIGNED
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda chain, move: b"{}", CorruptRecord),
        (lambda chain, move: b"x" * 70_000, CorruptRecord),
        (lambda chain, move: _signed(chain, move).to_bytes().replace(b'"version":1', b'"version":2'), UnsupportedVersion),
        (lambda chain, move: _signed(chain, dataclasses.replace(move, id="0" * 32)).to_bytes(), CorruptRecord),
        (lambda chain, move: _signed(chain, dataclasses.replace(move, channel="other")).to_bytes(), CorruptRecord),
        (lambda chain, move: _signed(chain, dataclasses.replace(move, move=7)).to_bytes(), CorruptRecord),
        (lambda chain, move: _signed(chain, dataclasses.replace(move, before="0" * 64)).to_bytes(), ChainBroken),
    ],
    ids=["empty", "long", "version", "run", "channel", "number", "before"],
)
def test_a_move_that_is_not_the_next_one_is_refused(
    key: SigningKey | None, change: Callable[[ChannelledChain, ChannelMove], bytes], error: type[DeltawireError]
) -> None:
    chain = ChannelledChain(key=key)
    chain.promote(1)
    follower = chain.reader()
    follower.newest()
    move = chain.promote(2)
    chain.store.put(keys.channel_key("stable", 1), change(chain, move))
    for reader in (follower, chain.reader()):
        with pytest.raises(error):
            reader.newest()
    assert follower.seen is not None
    assert follower.seen.move == 0


@pytest.mark.parametrize(
    ("target", "error"),
    [
        (lambda chain: CommitRef(99, "a" * 64, chain.commits[2].digest), DataMissing),
        (lambda chain: dataclasses.replace(chain.ref(2), commit="a" * 64), ChainBroken),
        (lambda chain: dataclasses.replace(chain.ref(2), digest=chain.commits[3].digest), ChainBroken),
        (lambda chain: dataclasses.replace(chain.ref(0), digest=chain.commits[3].digest), ChainBroken),
    ],
    ids=["unknown", "hash", "digest", "fence"],
)
def test_a_target_must_be_a_version_of_the_chain(target: Callable[..., CommitRef], error: type[DeltawireError]) -> None:
    chain = ChannelledChain()
    move = dataclasses.replace(chain.promote(1), target=target(chain.chain))
    with pytest.raises(error, match="move 0 of the channel stable"):
        target_of(chain.log(), move, newest_version(chain.log()))


def test_a_void_version_is_not_followed() -> None:
    chain = ChannelledChain(2)
    before = chain.chain.epoch
    chain.chain.claim(2)
    chain.chain.epoch = before
    void = chain.chain.delta()
    move = dataclasses.replace(chain.promote(1), target=chain.chain.ref(void.seq))
    log = chain.log()
    head = log.head()
    assert head is not None
    with pytest.raises(ChainBroken):
        target_of(log, move, head)
    with pytest.raises(VersionUnknown):
        chain.promote(void.seq)


def test_an_unsigned_move_on_a_signed_chain_is_refused() -> None:
    chain = ChannelledChain(key=KEY)
    move = chain.promote(1)
    follower = chain.reader()
    follower.newest()
    next_ = dataclasses.replace(move, move=1, before="a" * 64, signature=None)
    chain.store.put(keys.channel_key("stable", 1), next_.to_bytes())
    with pytest.raises(SignatureInvalid):
        follower.newest()


def test_a_move_of_the_share_cannot_change_the_version() -> None:
    chain = ChannelledChain()
    chain.promote(1)
    follower = chain.reader()
    first = follower.newest()
    move = dataclasses.replace(chain.writer().set_share(5), target=chain.chain.ref(2))
    chain.store.put(keys.channel_key("stable", 1), move.to_bytes())
    for reader in (follower, chain.reader()):
        with pytest.raises(ChainBroken, match="names another version"):
            reader.newest()
    assert follower.seen == first


def test_a_place_without_a_chain_is_not_called_one_without_a_channel() -> None:
    log = ChainLog(MemoryStore())
    for look in (ChannelReader(log, "stable").newest, ChannelWriter(log, "stable").rollback):
        with pytest.raises(NoChain):
            look()


def test_a_move_that_was_seen_does_not_change() -> None:
    chain = ChannelledChain()
    chain.promote(1)
    follower = chain.reader()
    follower.newest()
    chain.store.delete([keys.channel_key("stable", 0)])
    chain.promote(2)
    chain.promote(3)
    with pytest.raises(ChainBroken, match="seen before"):
        follower.newest()


def _signed(chain: ChannelledChain, move: ChannelMove) -> ChannelMove:
    return move if chain.key is None else chain.key.sign(move)
