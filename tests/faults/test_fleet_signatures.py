"""If the chain is signed, boards, rounds, batches and rejections are signed too, and members and trainers ignore unsigned ones."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from small_fleet import BIG, Fleet, Member, Trainer, acknowledged, assert_one_line_of_training, hashes_of, nonce
from test_fleet_members import LAST, board_of, poll

from deltawire.chain.records.pins import put_pin, remove_pin
from deltawire.errors import SignatureInvalid, StoreDenied
from deltawire.fleet import Coordinator
from deltawire.fleet.fleet_keyring import FleetKeyring
from deltawire.format.records.fleet_files import Accepted
from deltawire.format.records.fleet_parts import ObjectRef
from deltawire.format.records.signing import SigningKey
from deltawire.format.records.trainer_records import BatchRecord, Board, Rejection, Round
from deltawire.store import Store, fleet_keys
from deltawire.store.wrapped import WrappedStore

RECORDS = {fleet_keys.ROUNDS: Round, fleet_keys.BATCHES: BatchRecord, fleet_keys.REJECTED: Rejection}


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet(key=SigningKey.generate())
    made.join("a", "b")
    return made


def stopped(fleet: Fleet, board: Board) -> list[bool]:
    """Return for each member whether it leaves when the store has this board."""
    fleet.store.put(fleet_keys.BOARD, board.to_bytes())
    for member in fleet.members:
        member.move()
    return [member.ended for member in fleet.members]


def test_everything_that_a_trainer_writes_for_its_fleet_is_signed_if_the_chain_is(fleet: Fleet) -> None:
    assert fleet.key is not None
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.open(1)
        batch = trainer.collect(1)
        trainer.train(trainer.go(trainer.steps.reject(batch, [0], "a test")))
        found = [kind.parse(fleet.inner.get(info.key, limit=BIG)) for prefix, kind in RECORDS.items() for info in fleet.inner.list(prefix)]
        assert {type(record) for record in found} == set(RECORDS.values())
        for record in [*found, board_of(fleet)]:
            assert record.signature is not None
            assert FleetKeyring(trusted_keys=[fleet.key.public]).trusts(record)
            assert not FleetKeyring(trusted_keys=[SigningKey.generate().public]).trusts(record)
        with (
            Coordinator(fleet.inner, epoch=publisher.epoch, background=False) as other,
            pytest.raises(SignatureInvalid, match="signing_key"),
        ):
            other.poll()
        with Coordinator(fleet.inner, epoch=publisher.epoch, signing_key=publisher.signing_key, background=False) as other:
            other.poll()


def test_members_that_trust_a_key_do_not_leave_on_the_word_of_others(fleet: Fleet) -> None:
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.open(1)
        poll(fleet, trainer)
        good = board_of(fleet)
        forged = replace(good, number=good.number + 1, stop=True)
        assert stopped(fleet, replace(forged, signature=None)) == [False, False]
        assert stopped(fleet, forged) == [False, False]  # the signature belongs to another record
        assert stopped(fleet, SigningKey.generate().sign(forged)) == [False, False]
        assert [event.name for event in fleet.events].count("board-refused") == 2  # each member reports it once
        trainer.train(trainer.collect(1))
        trainer.go(trainer.steps.stop())
        assert stopped(fleet, board_of(fleet)) == [True, True]


def test_members_do_not_leave_because_of_an_old_signed_board(fleet: Fleet) -> None:
    """An attacker saved the last board of an earlier trainer, and writes it again."""
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.go(trainer.steps.stop())
        old = board_of(fleet)
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.open(1)
        poll(fleet, trainer)
        for member in fleet.members:
            member.move()
        fleet.join("fresh")  # this member has never seen another board
        assert stopped(fleet, old) == [False, False, False]
        seen = fleet.members[0].state.newest_board
        assert seen == (publisher.epoch, trainer.steps.board_writer.number)
        trainer.run_to(LAST)
    assert_one_line_of_training(fleet.inner, LAST)


def test_members_do_not_leave_because_of_an_old_unsigned_board() -> None:
    fleet = Fleet()
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.go(trainer.steps.stop())
        old = board_of(fleet)
    with fleet.publisher():
        fleet.join("a")
        assert stopped(fleet, old) == [False]


def test_boards_of_one_epoch_are_numbered_on_by_the_next_coordinator(fleet: Fleet) -> None:
    with fleet.publisher() as publisher:
        for _ in range(2):
            trainer = fleet.trainer(publisher)
            before = [member.state.newest_board for member in fleet.members]
            trainer.run_to(trainer.steps.newest.step + 1)
            assert all(member.state.newest_board > board for member, board in zip(fleet.members, before, strict=True))


def forge(fleet: Fleet, trainer: Trainer, step: int) -> None:
    """Write an unsigned round, a batch that accepts nothing, and a rejection of everything."""
    run = fleet.log.run.id
    true = trainer.steps.rounds[step].record
    for number in (true.round + 1, true.round + 2):
        rows = replace(true.rows, key=true.rows.key.replace(f"/{true.round:010}/", f"/{number:010}/"))
        fleet.inner.put(rows.key, fleet.inner.get(true.rows.key, limit=BIG))
        record = replace(true, round=number, rows=rows, epoch=99, signature=None)
        fleet.inner.put(fleet_keys.round_key(number), record.to_bytes())
    accepted = Accepted(true.round, ()).to_bytes()
    reference = ObjectRef(fleet_keys.accepted_key(true.round, blake3(accepted).hexdigest()), len(accepted), blake3(accepted).hexdigest())
    fleet.inner.put(reference.key, accepted)
    batch = BatchRecord(run, trainer.steps.epoch + 1, step, true.round, nonce(), reference, 0)
    fleet.inner.put(fleet_keys.batch_key(trainer.steps.epoch + 1, step), batch.to_bytes())
    results = tuple(
        (key.task, key.attempt, key.blake3)
        for info in fleet.inner.list(fleet_keys.ROLLOUTS)
        if (key := fleet_keys.parse_rollout_key(info.key)) is not None
    )
    rejection = Rejection(run, trainer.steps.epoch, step, true.round, results, "spite", 0).to_bytes()
    key = fleet_keys.RejectedKey(trainer.steps.epoch, step, blake3(rejection).hexdigest())
    fleet.inner.put(fleet_keys.rejected_key(key), rejection)


def test_a_trainer_that_takes_over_ignores_unsigned_records(fleet: Fleet) -> None:
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        trainer.open(1)
        first = hashes_of(trainer.collect(1))
        forge(fleet, trainer, 1)
        assert acknowledged(fleet.inner, trainer.steps.epoch, 1) == first
    with fleet.publisher() as publisher:
        trainer = fleet.trainer(publisher)
        assert [record.round for record in trainer.go(trainer.steps.resume())] == [0]
        fleet.inner.delete([fleet_keys.batch_key(trainer.steps.epoch, 1)])  # an attacker could not have created it beforehand
        assert hashes_of(trainer.collect(1)) == first
        assert trainer.open(2).round == 3  # forged rounds use up their numbers


class Restricted(WrappedStore):
    """A store that lets a member write only what the policy in docs/fleet.md allows."""

    def __init__(self, inner: Store, name: str) -> None:
        super().__init__(inner)
        text = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text()
        policy = json.loads(text.split("```json\n", 1)[1].split("```", 1)[0].replace("${aws:username}", name))
        self._allowed = [
            (action, resource.removeprefix("arn:aws:s3:::bucket/run-7/"))
            for statement in policy["Statement"]
            for action in ([statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"])
            for resource in statement["Resource"]
        ]
        self.denied: list[str] = []

    def _check(self, action: str, key: str) -> None:
        if not any(action == allowed and fnmatch.fnmatchcase(key, pattern) for allowed, pattern in self._allowed):
            self.denied.append(f"{action} {key}")
            raise StoreDenied(f"{action} of {key} is not allowed.")

    def put(self, key: str, data: Any, **options: Any) -> None:
        self._check("s3:PutObject", key)
        self.inner.put(key, data, **options)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._check("s3:PutObject", key)
        self.inner.put_if_absent(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        for key in wanted:
            self._check("s3:DeleteObject", key)
        self.inner.delete(wanted)


def test_members_need_no_more_rights_than_the_documented_policy_gives_them() -> None:
    fleet = Fleet()
    stores = [Restricted(fleet.store, "team"), Restricted(fleet.store, "other")]
    fleet.members = [Member(stores[0], "team-0", fleet.log), Member(stores[1], "other", fleet.log)]
    with fleet.publisher() as publisher:
        fleet.trainer(publisher).run_to(LAST)
    assert_one_line_of_training(fleet.inner, LAST)
    for member in fleet.members:
        put_pin(member.store, fleet.log.run, member.state.member, 0)
        remove_pin(member.store, member.state.member)
        member.leave()
    assert [store.denied for store in stores] == [[], []]
    for key in (fleet_keys.BOARD, fleet_keys.round_key(9), fleet_keys.batch_key(1, 1), fleet_keys.member_key("team-0"), "HEAD"):
        with pytest.raises(StoreDenied):
            stores[1].put(key, b"{}")
