"""A mirror always serves a whole version from its slots, with any readers and after any failure."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from straight_routes import StraightRoutes, update
from support import bits_of
from toy_chain import ToyChain, first_state, next_state

from deltawire.errors import BaseMismatch, DataMissing, MirrorError, ResultMismatch, RunMismatch
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.store.memory import MemoryStore
from deltawire.subscribe.mirror import mirror as mirror_module
from deltawire.subscribe.mirror import mirror_update
from deltawire.subscribe.mirror.mirror import HeldSlot, Mirror
from deltawire.subscribe.mirror.slot import CHANGING


@pytest.fixture
def chain() -> ToyChain:
    chain = ToyChain(MemoryStore())
    chain.anchor(first_state())
    return chain


@pytest.fixture
def mirror(chain: ToyChain, tmp_path: Path) -> Mirror:
    mirror = Mirror(tmp_path / "mirror")
    mirror.create(chain.run.id)
    return mirror


def served(mirror: Mirror) -> Any:
    with mirror.reading() as path:
        return bits_of(Checkpoint(path))


def names(mirror: Mirror) -> set[str]:
    return {slot.name for slot in mirror.slots()}


def test_an_anchor_is_served_as_a_checkpoint(chain: ToyChain, mirror: Mirror) -> None:
    update(mirror, chain).release()
    assert served(mirror) == bits_of(chain.state)


def test_the_mirror_itself_loads_as_a_checkpoint(chain: ToyChain, mirror: Mirror) -> None:
    update(mirror, chain).release()
    chain.delta()
    update(mirror, chain).release()
    assert bits_of(Checkpoint(mirror.path)) == bits_of(chain.state)
    with safe_open(mirror.path / "model-00001-of-00002.safetensors", framework="numpy") as file:
        name = next(iter(file.keys()))
        assert file.get_tensor(name).tobytes() == chain.state[name].tobytes()
    assert (mirror.path / "config.json").read_bytes() == b'{"model_type": "toy"}'
    assert json.loads((mirror.path / "deltawire.json").read_text())["seq"] == 2


def test_files_that_a_new_anchor_does_not_have_are_no_longer_linked(chain: ToyChain, mirror: Mirror) -> None:
    update(mirror, chain).release()
    chain._shards = 1
    chain.anchor({**first_state(3), "new.weight": np.zeros(3, np.float32)}, extra={"tokenizer.json": b"{}"})
    update(mirror, chain).release()
    assert bits_of(Checkpoint(mirror.path)) == bits_of(chain.state)
    assert not list(mirror.path.glob("model-0000*"))
    assert (mirror.path / "tokenizer.json").exists()


def test_updates_alternate_between_two_slots_and_fetch_nothing_twice(chain: ToyChain, mirror: Mirror) -> None:
    update(mirror, chain).release()
    routes = StraightRoutes(chain)
    used = []
    for _ in range(6):
        chain.delta()
        held = update(mirror, chain, routes=routes)
        used.append(held.slot.name)
        held.release()
        assert served(mirror) == bits_of(chain.state)
        assert len(mirror.slots()) <= 2
    assert len(set(used)) == 2
    assert used[0::2] == [used[0]] * 3
    assert len(routes.fetched) == len(set(routes.fetched)) == 12


def test_a_reader_that_lags_keeps_its_version_while_others_move_on(chain: ToyChain, mirror: Mirror) -> None:
    laggard = update(mirror, chain)
    old = Checkpoint(laggard.slot.path)
    before = bits_of(chain.state)
    for _ in range(5):
        chain.delta()
        update(mirror, chain).release()
        assert bits_of(old) == before
        assert served(mirror) == bits_of(chain.state)
    assert len(mirror.slots()) == 3
    laggard.release()
    chain.delta()
    update(mirror, chain).release()
    assert len(mirror.slots()) == 2


def test_a_slot_that_lags_far_behind_is_overwritten_by_a_copy_rather_than_fetched_for(
    chain: ToyChain, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_update, "_COPY_COST", 0)
    laggard = update(mirror, chain)
    held = laggard
    for _ in range(3):
        chain.delta()
        held = update(mirror, chain)
        held.release()
    other = next(slot for slot in mirror.slots() if slot.name not in (held.slot.name, laggard.slot.name))
    mirror.drop(other)
    laggard.release()
    chain.delta()
    routes = StraightRoutes(chain)
    update(mirror, chain, routes=routes).release()
    assert routes.fetched == [entry.key for entry in chain.commits[-1].files]
    assert served(mirror) == bits_of(chain.state)


def test_a_reader_of_the_mirror_sees_one_version_during_an_update(chain: ToyChain, mirror: Mirror) -> None:
    update(mirror, chain).release()
    seen = []
    chain.delta()
    old, new = bits_of(chain.states[1] or {}), bits_of(chain.state)
    mirror.step = lambda step: seen.append((step, served(mirror)))
    update(mirror, chain).release()
    moved = [step for step, _ in seen].index("served")
    assert [state == old for _, state in seen] == [index < moved for index in range(len(seen))]
    assert all(state == new for _, state in seen[moved:])


class Died(BaseException):
    """A failure that no code expects."""


STEPS = ["route-chosen", "slot-made", "slot-copied", "hop-fetched", "file-applied", "digest-checked", "hop-done", "marked-clean"]
STEPS += ["lock-shared", "link-made", "served", "files-linked", "tidied"]


TWICE = ["hop-fetched", "file-applied", "digest-checked", "hop-done"]


@pytest.mark.parametrize(("step", "nth"), [*((step, 1) for step in [*STEPS, "marked-dirty"]), *((step, 2) for step in TWICE)])
def test_a_failure_at_any_step_leaves_a_whole_version_and_the_next_update_heals(
    chain: ToyChain, mirror: Mirror, step: str, nth: int
) -> None:
    update(mirror, chain).release()
    if step == "marked-dirty":
        chain.delta()
        update(mirror, chain).release()
    chain.grow(2)
    whole = [bits_of(state) for state in chain.states if state is not None]
    mirror.step = dies_at(step, nth)
    with pytest.raises(Died):
        update(mirror, chain)
    assert served(mirror) in whole
    mirror.step = lambda _: None
    update(mirror, chain).release()
    assert served(mirror) == bits_of(chain.state)
    chain.delta()
    update(mirror, chain).release()
    assert served(mirror) == bits_of(chain.state)
    assert len(mirror.slots()) <= 2
    assert not list(mirror.path.glob(".*"))
    assert {path.name for path in (mirror.path / "locks").iterdir()} == {"create", "writer", *(f"slot-{name}" for name in names(mirror))}


def dies_at(step: str, nth: int = 1) -> Callable[[str], None]:
    left = [nth]

    def hook(reached: str) -> None:
        if reached == step:
            left[0] -= 1
            if left[0] == 0:
                raise Died(step)

    return hook


def test_files_of_an_anchor_that_arrived_before_a_failure_are_not_fetched_again(chain: ToyChain, mirror: Mirror) -> None:
    routes = StraightRoutes(chain)
    mirror.step = dies_at("anchor-file-fetched", 2)
    with pytest.raises(Died):
        update(mirror, chain, routes=routes)
    mirror.step = lambda _: None
    update(mirror, chain, routes=routes).release()
    assert len(routes.fetched) == len(set(routes.fetched)) == 4
    assert served(mirror) == bits_of(chain.state)


def test_a_slot_stays_usable_at_the_version_it_reached_when_the_next_hop_is_lost(chain: ToyChain, mirror: Mirror) -> None:
    update(mirror, chain).release()
    chain.delta()
    update(mirror, chain).release()
    chain.grow(2)
    chain.lose(chain.commits[4].files[1])
    with pytest.raises(DataMissing):
        update(mirror, chain)
    records = sorted((record.seq, record.clean) for slot in mirror.slots() if (record := slot.record()))
    assert records == [(2, True), (3, True)]


def test_bit_rot_in_the_standby_slot_is_noticed_and_the_slot_is_rebuilt(chain: ToyChain, mirror: Mirror) -> None:
    update(mirror, chain).release()
    chain.delta()
    update(mirror, chain).release()
    standby = next(slot for slot in mirror.slots() if slot.name != mirror.current_name())
    rot(standby.path / "model-00001-of-00002.safetensors")
    chain.delta()
    routes = StraightRoutes(chain)
    update(mirror, chain, routes=routes).release()
    assert served(mirror) == bits_of(chain.state)
    assert not routes.avoided
    assert standby.name not in names(mirror)


def test_bit_rot_in_all_slots_leads_to_the_store(chain: ToyChain, mirror: Mirror) -> None:
    update(mirror, chain).release()
    chain.delta()
    update(mirror, chain).release()
    for slot in mirror.slots():
        rot(slot.path / "model-00001-of-00002.safetensors")
    chain.delta()
    routes = StraightRoutes(chain)
    update(mirror, chain, routes=routes).release()
    assert served(mirror) == bits_of(chain.state)
    assert {entry.key for entry in chain.commits[1].files} <= set(routes.fetched)


def test_a_file_cut_short_counts_as_rot(chain: ToyChain, mirror: Mirror) -> None:
    update(mirror, chain).release()
    chain.delta()
    update(mirror, chain).release()
    standby = next(slot for slot in mirror.slots() if slot.name != mirror.current_name())
    os.truncate(standby.path / "model-00002-of-00002.safetensors", 100)
    chain.delta()
    update(mirror, chain).release()
    assert served(mirror) == bits_of(chain.state)


def test_a_delta_that_does_not_lead_to_its_commit_is_not_served(chain: ToyChain, mirror: Mirror) -> None:
    update(mirror, chain).release()
    lying = next_state(chain.state, 5)
    files = chain.delta_files(next_state(chain.state, 6), lying)
    chain._append(lying, kind="delta", base=chain.ref(1), files=files, changed=1)
    with pytest.raises(BaseMismatch):
        update(mirror, chain)
    assert served(mirror) == bits_of(chain.states[1] or {})


def rot(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)


def reboot(monkeypatch: pytest.MonkeyPatch, boot: str | None = "another boot") -> list[str]:
    """Pretend that the machine was restarted. Return a list of the slots that are read in full from now on."""
    scanned: list[str] = []
    intact = mirror_module.Slot.is_intact
    monkeypatch.setattr(mirror_module, "boot_id", lambda: boot)
    monkeypatch.setattr(mirror_update, "boot_id", lambda: boot)
    monkeypatch.setattr(mirror_module.Slot, "is_intact", lambda self, *a, **k: scanned.append(self.name) or intact(self, *a, **k))
    return scanned


def test_after_a_reboot_a_slot_is_read_in_full_once(chain: ToyChain, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    update(mirror, chain).release()
    scanned = reboot(monkeypatch)
    for _ in range(3):
        assert served(mirror) == bits_of(chain.state)
    assert scanned == [mirror.current_name()]


def test_on_a_system_that_cannot_tell_boots_apart_a_slot_is_read_in_full_whenever_it_is_opened(
    chain: ToyChain, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned = reboot(monkeypatch, None)
    update(mirror, chain).release()
    assert served(mirror) == served(mirror) == bits_of(chain.state)
    assert len(scanned) == 2


def test_within_a_boot_nothing_is_read_in_full(chain: ToyChain, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    scanned = reboot(monkeypatch)
    for _ in range(4):
        update(mirror, chain).release()
        chain.delta()
        served(mirror)
    assert scanned == []


def recovered(mirror: Mirror) -> HeldSlot | None:
    writer = mirror.try_writer()
    assert writer is not None
    with writer:
        return mirror.recover()


def test_a_slot_damaged_by_a_loss_of_power_is_not_served_but_the_other_is(
    chain: ToyChain, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    update(mirror, chain).release()
    chain.delta()
    held = update(mirror, chain)
    held.release()
    rot(held.slot.path / "model-00001-of-00002.safetensors")
    reboot(monkeypatch)
    assert mirror.open_current() is None
    with pytest.raises(MirrorError, match="no sound version"), mirror.reading():
        pass
    other = recovered(mirror)
    assert other is not None
    assert other.record.seq == 1
    other.release()
    assert served(mirror) == bits_of(chain.states[1] or {})
    update(mirror, chain).release()
    assert served(mirror) == bits_of(chain.state)


def test_when_every_slot_is_torn_nothing_is_served_until_the_store_has_been_asked(
    chain: ToyChain, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    update(mirror, chain).release()
    chain.delta()
    update(mirror, chain).release()
    for slot in mirror.slots():
        rot(slot.path / "model-00001-of-00002.safetensors")
    reboot(monkeypatch)
    assert recovered(mirror) is None
    assert mirror.hold_current() is None
    update(mirror, chain).release()
    assert served(mirror) == bits_of(chain.state)


def test_a_slot_that_was_written_only_in_part_is_never_opened(chain: ToyChain, mirror: Mirror) -> None:
    held = update(mirror, chain)
    held.slot.write_record(mirror_update.replace(held.record, phase=CHANGING))
    held.release()
    assert mirror.open_current() is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"record": "x", "phase": "clean", "boot_id": null}', "\0" * 100])
def test_a_slot_with_an_unreadable_record_is_never_opened(chain: ToyChain, mirror: Mirror, text: str) -> None:
    held = update(mirror, chain)
    held.release()
    (held.slot.path / "deltawire.json").write_text(text)
    assert mirror.open_current() is None
    assert recovered(mirror) is None
    update(mirror, chain).release()
    assert served(mirror) == bits_of(chain.state)


def test_tensors_that_are_misaligned_in_their_file_are_changed_all_the_same(tmp_path: Path) -> None:
    chain = ToyChain(MemoryStore(), shards=1)
    chain.anchor(first_state())
    original = chain.checkpoint

    def misaligned(state: Any, **more: Any) -> Any:
        files = original(state, **more)
        data = chain.store.get(files[0].key, limit=1 << 20)
        length = int.from_bytes(data[:8], "little")
        shifted = (length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :]
        return (chain.upload(shifted, "safetensors", raw=files[0].raw, name=files[0].name), *files[1:])

    chain.checkpoint = misaligned  # type: ignore[method-assign]
    chain.anchor(first_state(4))
    mirror = Mirror(tmp_path / "mirror")
    mirror.create(chain.run.id)
    update(mirror, chain).release()
    for _ in range(3):
        chain.delta()
        update(mirror, chain).release()
        assert served(mirror) == bits_of(chain.state)


def test_a_mirror_is_of_one_run(chain: ToyChain, mirror: Mirror) -> None:
    mirror.create(chain.run.id)
    with pytest.raises(RunMismatch):
        mirror.create("0" * 32)


def test_a_directory_with_other_files_does_not_become_a_mirror(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(MirrorError, match="other files"):
        Mirror(tmp_path).create("0" * 32)


def test_a_mirror_of_another_layout_is_left_alone(mirror: Mirror) -> None:
    (mirror.path / "mirror.json").write_text('{"layout": 2, "run": "x"}')
    with pytest.raises(MirrorError, match="another layout"):
        mirror.create("x")


def test_an_empty_mirror_serves_nothing(mirror: Mirror) -> None:
    assert mirror.open_current() is None
    with pytest.raises(MirrorError), mirror.reading():
        pass


def test_a_copy_by_hard_links_keeps_its_version(chain: ToyChain, mirror: Mirror, tmp_path: Path) -> None:
    """`cp --link` shares the files themselves. Updates change slots in place, but never a slot whose files have other names too."""
    update(mirror, chain).release()
    with mirror.reading() as path:
        shutil.copytree(path, tmp_path / "copy", copy_function=os.link)
    before = bits_of(Checkpoint(tmp_path / "copy"))
    for _ in range(4):
        chain.delta()
        update(mirror, chain).release()
        assert served(mirror) == bits_of(chain.state)
        assert bits_of(Checkpoint(tmp_path / "copy")) == before
    assert len(mirror.slots()) == 2


OWN_NAMES = ("deltawire.json.tmp-0", "current.tmp-0", "mirror.json.tmp-0", "seen.json", "deltas.tmp", "x.tmp-1")


def test_attachments_may_be_named_like_temporary_files(mirror: Mirror, chain: ToyChain) -> None:
    chain.anchor(first_state(3), extra={name: name.encode() for name in OWN_NAMES})
    for _ in range(3):
        update(mirror, chain).release()
        with mirror.reading() as path:
            assert {name: (path / name).read_bytes() for name in OWN_NAMES} == {name: name.encode() for name in OWN_NAMES}
        assert (mirror.path / "x.tmp-1").read_bytes() == b"x.tmp-1"
        chain.delta()


class BoundedRoutes(StraightRoutes):
    """A planner that fails a test that would otherwise never end."""

    def find(self, have: Any, target: Any) -> Any:
        self.finds = getattr(self, "finds", 0) + 1
        assert self.finds < 20, "the update tries the same routes forever"
        return super().find(have, target)


def test_a_hop_that_fails_without_changing_its_slot_is_not_tried_for_ever(chain: ToyChain, mirror: Mirror) -> None:
    """Readers refuse such a record. If one were accepted, the first update would leave a clean second slot behind."""
    update(mirror, chain).release()
    good = served(mirror)
    chain.commits[-1] = replace(chain.delta(), files=())
    for _ in range(2):
        with pytest.raises(ResultMismatch):
            update(mirror, chain, routes=BoundedRoutes(chain))
        assert served(mirror) == good
