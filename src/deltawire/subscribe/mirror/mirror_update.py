"""Bring a mirror to another version: choose a slot and a route, change the slot, check it, and serve it.

The slot that is served never changes, whatever fails. Between two hops of a route a slot is complete. So if the next hop cannot be fetched,
the slot stays usable at the version that it has reached. A failure in the middle of a hop leaves the slot marked as not clean, and it is
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ...chain.routes.remaining_routes import FindRoute
from ...chain.routes.restore import Hop
from ...chain.routes.walk_route import HopFailed, walk_route
from ...errors import CheckpointError, DeltaError, DeltawireError, StateError, TensorError
from ...events import OnEvent, emit
from ...format.records.record_parts import CommitRef, FileEntry
from ...format.records.version_records import Commit
from ...warnings import AttachmentLeftOut, warn
from ..cache.delta_cache import DeltaCache
from ..sync_report import SyncReport
from .hops_on_disk import HopsOnDisk, Source
from .mirror import HeldSlot, Mirror
from .slot import CHANGING, CLEAN, FETCHING, RECORD_FILE, Slot, SlotRecord, boot_id

_COPY_SPEED, _COPY_COST = 8, 4 << 20
"""The ratio of the speeds of copying a slot and fetching it, and the fixed cost of a copy, in bytes fetched.

They only decide which of two good routes is taken.
"""

_CACHE_SHARE, _CACHE_LEAST = 4, 64 << 20
"""Delta files are kept for the other slot up to this share of the state's size, or at least this many bytes."""

_START_ERRORS: tuple[type[DeltawireError], ...] = (DeltaError, StateError, TensorError, CheckpointError)
"""Errors that a slot with wrong content can cause. A slot is checked only where it is changed, so a wrong result is among them."""


@dataclass(frozen=True, slots=True)
class _Route:
    """The hops of an update and the slot that they start from: the standby slot `held`, a copy of `copied`, or an empty slot."""

    hops: Sequence[Hop]
    cost: float
    held: HeldSlot | None = None
    copied: Slot | None = None


class MirrorUpdate:
    """One update of a mirror. The caller holds the writer's lock."""

    def __init__(self, mirror: Mirror, routes: FindRoute, source: Source, report: SyncReport, *, on_event: OnEvent | None = None) -> None:
        self._mirror = mirror
        self._routes = routes
        self._source = source
        self._report = report
        self._on_event = on_event
        self._deltas = DeltaCache(mirror.path / "deltas")
        self._on_disk = HopsOnDisk(source, self._deltas, report, threads=mirror.threads, step=mirror.step)
        self._spoilt: set[str] = set()
        """Slots whose content is not what their records say."""
        self._used: list[FileEntry] = []
        self._taken: list[HeldSlot] = []
        """Every slot whose lock was taken. All of them are released at the end, except the one that is then served."""

    def run(self, target: Commit, *, replacing: HeldSlot | None = None, check_wanted: Callable[[], None] = lambda: None) -> HeldSlot:
        """Serve the version of `target`, and return its slot with a shared lock. Raises the error of the last route that was tried.

        `replacing` is the slot that the caller reads until now and will then release. `check_wanted` is called when the version is
        complete, before it is served, and may raise an exception.
        """
        held: HeldSlot | None = None
        route = _Route((), 0.0)

        def find() -> Sequence[Hop]:
            nonlocal route
            route = self._choose(target)
            return route.hops

        try:
            held = walk_route(
                self._routes,
                find,
                lambda _: self._take_route(route),
                drop_base=lambda failure: self._drop_start(route, failure),
                base_errors=_START_ERRORS,
            )
            check_wanted()
            self._mirror.serve(held)
            self._mirror.tidy(soon_free=None if replacing is None else replacing.slot.name)
            self._deltas.keep_only(self._used, max(target.state_bytes // _CACHE_SHARE, _CACHE_LEAST))
        except BaseException:
            held = None
            raise
        finally:
            for taken in self._taken:
                if taken is not held:
                    taken.release()
        return held

    def _take_route(self, route: _Route) -> HeldSlot:
        """Bring one slot to the version. Return the slot."""
        held = self._start(route)
        try:
            self._walk(held, route)
        except HopFailed:
            held.release()
            raise
        self._report.hops = len(route.hops)
        self._report.resynced = bool(route.hops) and route.hops[0].base is None
        return held

    def _drop_start(self, route: _Route, failure: HopFailed) -> None:
        """Exclude the slot that the route started from, because it does not hold what its record says."""
        start = route.held.slot if route.held is not None else route.copied
        assert start is not None  # only a route from nothing has neither, and its first hop has no base
        self._spoilt.add(start.name)
        emit(self._on_event, "state-refused", seq=failure.hop.base, slot=start.name, reason=str(failure.error))

    # Where to start

    def _choose(self, target: Commit) -> _Route:
        routes = [route for route in (self._from_standby(target), self._from_copy(target)) if route is not None]
        best = min(routes, key=lambda route: route.cost, default=None)
        for route in routes:
            if route.held is not None and route is not best:
                route.held.release()
        if best is None:
            return _Route(self._find(None, target), 0.0)
        if best.hops and best.hops[0].base is None:  # a full checkpoint, so the present slots are of no use
            if best.held is not None:
                best.held.release()
            return replace(best, held=None, copied=None)
        return best

    def _from_standby(self, target: Commit) -> _Route | None:
        """Return a route from the newest slot that no reader uses. Its content is checked while it is changed."""
        current = self._mirror.current_name()
        found: HeldSlot | None = None
        for slot in self._mirror.slots():
            held = self._hold(slot) if slot.name != current and slot.name not in self._spoilt else None
            if held is None:
                continue
            if not held.record.clean or (found is not None and found.record.seq >= held.record.seq):
                held.release()
                continue
            if found is not None:
                found.release()
            found = held
        if found is None:
            return None
        with self._report.watch.phase("verify"):
            if found.slot.is_linked() or not self._mirror.is_sound(found):
                found.release()
                self._mirror.drop(found.slot)
                return None
        hops = self._find(found.record.ref, target)
        return _Route(hops, self._bytes_to_fetch(hops), held=found)

    def _from_copy(self, target: Commit) -> _Route | None:
        name = self._mirror.current_name()
        record = None if name is None or name in self._spoilt else self._mirror.slot(name).record()
        if name is None or record is None or not record.clean:
            return None
        hops = self._find(record.ref, target)
        copying = _COPY_COST + record.commit.state_bytes / _COPY_SPEED
        return _Route(hops, copying + self._bytes_to_fetch(hops), copied=self._mirror.slot(name))

    def _find(self, have: CommitRef | None, target: Commit) -> list[Hop]:
        with self._report.watch.phase("find"):
            return self._routes.find(have, target)

    def _bytes_to_fetch(self, hops: Sequence[Hop]) -> int:
        return sum(entry.size for hop in hops for entry in hop.files if not self._deltas.holds(entry))

    def _start(self, route: _Route) -> HeldSlot:
        """Return the slot to change. Useless slots are deleted first, because there may be no space for one more."""
        self._mirror.step("route-chosen")
        if route.held is not None:
            return route.held
        anchor = route.hops[0].target if route.copied is None else None
        resumed: HeldSlot | None = None
        for slot in self._mirror.slots():
            if slot.name == self._mirror.current_name():
                continue
            held = self._hold(slot)
            if (
                held is not None
                and anchor is not None
                and resumed is None
                and held.record.phase == FETCHING
                and held.record.commit == anchor
            ):
                resumed = held
                continue
            if held is not None:
                held.release()
            self._mirror.drop(slot)
        if anchor is not None:
            return resumed or self._take(self._mirror.new_slot(anchor, FETCHING))
        assert route.copied is not None
        record = route.copied.record()
        assert record is not None
        held = self._take(self._mirror.new_slot(record.commit, CHANGING))
        with self._report.watch.phase("copy"):
            held.slot.copy_files_from(route.copied)
        self._mirror.step("slot-copied")
        return held

    def _hold(self, slot: Slot) -> HeldSlot | None:
        held = self._mirror.hold_exclusively(slot)
        return None if held is None else self._take(held)

    def _take(self, held: HeldSlot) -> HeldSlot:
        self._taken.append(held)
        return held

    # The route

    def _walk(self, held: HeldSlot, route: _Route) -> None:
        """Take the slot along the hops. Afterwards its record is clean, at the last version that was completely reached.

        A version is complete only with its own attachments. They are changed at the end, so versions in between with other attachments are
        not complete.
        """
        from_nothing = bool(route.hops) and route.hops[0].base is None
        reached = None if from_nothing else held.record.commit
        attached = () if from_nothing else held.record.commit.attachments
        hops = list(route.hops)
        if hops:
            self._on_disk.fetch_attachments(hops[-1].target, held.slot.path)
        with ThreadPoolExecutor(1, "deltawire-prefetch") as ahead:
            try:
                arriving = before = None
                for index, hop in enumerate(hops):
                    if hop.base is None:
                        self._on_disk.fetch_checkpoint(hop, held.slot.path, leave_out={RECORD_FILE})
                        if hop.target.attachments in (None, hops[-1].target.attachments):  # these were fetched above
                            self._attach(held, hop.target)
                            attached = hop.target.attachments
                            self._mark_clean(held, hop.target)
                    else:
                        (arriving or ahead.submit(self._on_disk.fetch_deltas, hop)).result()
                        arriving = ahead.submit(self._on_disk.fetch_deltas, hops[index + 1]) if index + 1 < len(hops) else None
                        self._mirror.step("hop-fetched")
                        assert reached is not None
                        before, reached = reached, None  # the slot is at no version until the hop is done
                        self._change(held, hop, before)
                    reached = before if hop.target.kind == "fence" else hop.target
                    self._mirror.step("hop-done")
                if hops:
                    assert reached is not None
                    self._attach(held, reached)
                    attached = reached.attachments
            except BaseException:  # also Ctrl-C: the fetching thread is joined below, so it must not wait for data
                self._source.abandon()
                raise
            finally:
                if reached is not None and reached.attachments in (None, attached):
                    self._mark_clean(held, reached)

    def _attach(self, held: HeldSlot, target: Commit) -> None:
        """Make the slot's attachments those of a version."""
        if target.attachments is not None and not held.slot.has_attachments(target):
            if any(entry.name == RECORD_FILE for entry in target.attachments):
                message = (
                    f"{RECORD_FILE} of {target.describe()} is left out, as mirrors write a file of that name. `deltawire pull` has it."
                )
                warn(AttachmentLeftOut, message, self._on_event, may_raise=False, seq=target.seq)
            self._mark_dirty(held)
            self._on_disk.place_attachments(target, held.slot.path, own_names=(RECORD_FILE,))
            self._used.extend(target.attachments)

    def _mark_clean(self, held: HeldSlot, reached: Commit) -> None:
        record = SlotRecord(reached, CLEAN, boot_id())
        if held.record != record:
            held.slot.write_record(record)
            held.record = record
            self._mirror.step("marked-clean")

    def _mark_dirty(self, held: HeldSlot) -> None:
        if held.record.clean:
            held.record = replace(held.record, phase=CHANGING)
            held.slot.write_record(held.record)
            self._mirror.step("marked-dirty")

    def _change(self, held: HeldSlot, hop: Hop, before: Commit) -> None:
        assert before.digest is not None
        if hop.files:
            self._mark_dirty(held)
        self._on_disk.apply_deltas(hop, held.slot.path, before.digest)
        self._used.extend(hop.files)
