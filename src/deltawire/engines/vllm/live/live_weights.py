"""A worker's weights at a version of the chain. Updates are decoded against them, and written to them in one transaction.

All workers of a server make a swap together. First they tell each other whether they are ready. Then each writes its part and
checks it. If any of them fails, all write the old values back. A worker whose weights are then not exactly the old ones is *quarantined*.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from ....delta.windows import near_tensors
from ....errors import BaseMismatch, ChainBroken, EngineQuarantined, EngineRefused, ResultMismatch
from ....format import delta_file
from ....format.delta_file import DeltaBytes
from ....format.digest import Digest, TensorKeys
from ....format.records.record_parts import CommitRef, FileEntry
from ....format.records.version_records import Commit
from ....subscribe.tensor_table import TensorSpec, TensorTable
from ....tensors.gpu_handover import on_side_stream, synchronize_streams
from ....tensors.state import state_digest
from .direct_tensors import DirectTensors
from .interfaces import BaseSource, Layout, base_of, some_memory
from .layout_update import LayoutUpdate
from .module_rules import Load, ModuleRules, Recompute, Reprocess
from .ownership import Blocks, Decoders, Owned, find_owned
from .staging_pace import StagingPace
from .swap_transaction import make_swap, noting, timed
from .undo import LiveUndo
from .update_types import Agree, Digests, LiveVersion, Outcome, StagedUpdate, SwapOutcome

logger = logging.getLogger("vllm.deltawire")

Confirm = Literal["auto", "written", "everything"]
"""The check within a swap: the digest of all direct tensors, if that is quick; only listed elements; or every element."""

Read: TypeAlias = Callable[[FileEntry], DeltaBytes]
"""Returns the bytes of a file of a hop."""

_QUICK_BYTES = {"cpu": 1 << 30, "cuda": 20 << 30}
"""Direct tensors of at most this size are digested within a swap. A GPU needs 0.27 ms per GB."""


class DeltaHop(Protocol):
    """A hop whose files are at hand."""

    @property
    def base(self) -> Commit: ...

    @property
    def target(self) -> Commit: ...

    @property
    def target_ref(self) -> CommitRef: ...

    @property
    def files(self) -> Sequence[FileEntry]: ...


class LiveWeights:
    """A worker's weights. `learn` must be called first, then `adopt` with the version that they have.

    Parameters
    ----------
    model
        The worker's model.
    learn_layout
        Finds where the model keeps each element of the chain's tensors.
    source
        Has the tensors that the worker cannot read from its own memory. None if there is none.
    recompute
        Computes tensors of modules that depend on changed weights, in place. None if no module can be recomputed.
    reprocess
        Processes a module again that is computed from changed weights (`module_rules.Reprocess`). None if no module can be processed again.
    load
        Prepares to load a module anew within a swap (`module_rules.Load`). None if no module can be loaded anew.
    confirm
        What is checked within a swap.
    threads
        Number of threads for decoding and digests on the host. None means one per core.
    pace
        Spreads the decoding of an update over time. None means that nothing waits.
    """

    def __init__(
        self,
        model: Any,
        learn_layout: Callable[[TensorTable], Layout],
        *,
        source: BaseSource | None = None,
        recompute: Recompute | None = None,
        reprocess: Reprocess | None = None,
        load: Load | None = None,
        confirm: Confirm = "auto",
        threads: int | None = None,
        pace: StagingPace | None = None,
    ) -> None:
        self._model = model
        self._learn_layout = learn_layout
        self._source = source
        self._rules = ModuleRules(recompute, reprocess, load)
        self._confirm = confirm
        self._threads = threads
        self._pace = pace or StagingPace(1, None)
        self.version: LiveVersion | None = None
        """The version that the weights have. None if it is unknown."""
        self.layout: Layout | None = None
        self.is_quarantined = False
        """True if the weights are in an unknown state."""
        self.is_unconfirmed = False
        """True if the direct tensors were written, but not digested since."""
        self.table: TensorTable | None = None
        """The tensors of the chain whose layout was learnt."""
        self._names: Sequence[str] = ()
        self._direct_tensors = DirectTensors({})
        self._is_quick = True
        """True if the digest of the direct tensors is computed within each swap."""
        self._unreadable: str | None = None
        self._direct_digest = self._mapped_digest = Digest()
        self._owned: Mapping[str, Owned] = {}
        self._unheld: Sequence[str] = ()
        """Tensors of which no worker holds anything. The first worker digests them."""
        self._rank = 0
        self._decoders: Decoders | None = None
        self.undo = LiveUndo()
        """The last updates, if they are kept."""

    def learn(self, table: TensorTable, *, alone: bool = True) -> None:
        """Learn where the model keeps each element of the chain's tensors. The version is forgotten. Call it on the worker's main thread.

        Parameters
        ----------
        table
            The tensors of the chain.
        alone
            False if there are several workers. `own` must then be called next.
        """
        self.forget()
        self.table = self.layout = None
        layout = self._learn_layout(table)
        self.table, self._names = table, list(table)
        self._direct_tensors = DirectTensors(layout.tensors)
        direct = self._direct_tensors.by_name.values()
        limit = {tensor.device: _QUICK_BYTES.get(tensor.device.type, 0) for tensor in direct}
        self._is_quick = sum(tensor.nbytes for tensor in direct) <= min(limit.values(), default=0)
        self._unreadable = None
        self.layout = layout
        if alone:
            self.own([layout.blocks()], 0)

    def own(self, held: Sequence[Blocks], rank: int, needed: Sequence[Collection[str]] | None = None) -> None:
        """Find out which elements this worker owns, and let the source get hold of what it cannot read. `why_not` says whether it can.

        Parameters
        ----------
        held
            The parts of tensors that each worker holds, by rank (`Layout.blocks`).
        rank
            The rank of this worker.
        needed
            The tensors that each worker needs (`needed`), by rank. None means all.
        """
        assert self.layout is not None
        self._rank = rank
        self._decoders = Decoders.of(needed, self.layout.tensors, rank) if needed is not None and len(needed) > 1 else None
        self._owned, self._unheld = find_owned(held, rank)
        self.layout.owned.update({name: owned.blocks for name, owned in self._owned.items()})
        self._unreadable = self._hold_unreadable(self.layout)

    @property
    def needed(self) -> frozenset[str]:
        """The tensors that this worker needs new values of. It holds nothing of the others."""
        assert self.layout is not None
        return frozenset(name for name, tensor in self.layout.tensors.items() if tensor.kind != "absent")

    def set(self, *, confirm: Confirm, threads: int | None, pace: StagingPace, undo_bytes: int = 0) -> None:
        """Change settings. Layout and version stay.

        Parameters
        ----------
        confirm
            What is checked within a swap.
        threads
            Number of threads for decoding and digests on the host. None means one per core.
        pace
            Spreads the decoding of an update over time.
        undo_bytes
            The most memory that the last updates may take, so that the weights can go back to earlier versions.
        """
        self.undo.most_bytes = undo_bytes
        self._confirm, self._threads, self._pace = confirm, threads, pace

    @property
    def why_not(self) -> str | None:
        """The reason why these weights cannot be updated where they are. None if they can."""
        if self.layout is None:
            return "the layout of the weights is not known"
        if not self.layout.is_valid_for(self._model):
            return "a tensor of the model has moved in memory"
        return self._unreadable

    def digest(self) -> Digests:
        """Read all weights, in the layout of the checkpoint, and return their digests. A GPU works on a separate stream."""
        assert self.layout is not None
        with on_side_stream(self._direct_tensors.state) as wait:
            self._direct_digest, self._mapped_digest = self._digest_direct(), Digest()
            direct = self._direct_tensors.by_name
            foreign = {name: tensor for name, tensor in direct.items() if not self._owned[name].blocks and name not in self._unheld}
            owned = self._direct_digest - state_digest(foreign, threads=self._threads)
            replicated: dict[tuple[int, ...], Digest] = {}
            for name, tensor in self.layout.tensors.items():
                if tensor.direct is None:
                    owned += self._digest_other(name)
                if holders := self._owned[name].holders:
                    own = tensor.direct if tensor.direct is not None else self.layout.gather(name)
                    replicated[holders] = replicated.get(holders, Digest()) + state_digest({name: own}, threads=self._threads)
            wait()
        return Digests(owned, replicated)

    def adopt(self, version: LiveVersion) -> None:
        """Take the weights for those of a version. Raises `BaseMismatch` if they are not.

        Parameters
        ----------
        version
            The version.
        """
        found = self.digest().owned
        if found != version.digest:
            raise BaseMismatch(f"the weights in memory have digest {found}; those of commit {version.ref.seq} have {version.digest}.")
        self.label(version)

    def label(self, version: LiveVersion) -> None:
        """Take the weights for those of a version. The caller has compared the result of `digest`, over all workers, with its digest.

        Parameters
        ----------
        version
            The version.
        """
        self.version, self.is_quarantined, self.is_unconfirmed = version, False, False
        self.undo.clear()

    def forget(self) -> None:
        """Forget the version, because other code has written to the weights."""
        self.version = None
        self.undo.clear()

    def quarantine(self) -> None:
        """Take the weights for unknown. They accept no update then, until other code has loaded them."""
        self.version, self.is_quarantined, self.is_unconfirmed = None, True, False
        self.undo.clear()

    def stage(self, hop: DeltaHop, read: Read, peek: Read | None = None) -> StagedUpdate:
        """Decode a hop against the live weights, while the server generates. Changes nothing.

        Raises `BaseMismatch` if the hop begins at another version or the live weights are not what they should be, `ResultMismatch` if it
        does not lead to its target, and `EngineRefused` if this update cannot be written to live memory.

        Parameters
        ----------
        hop
            The hop.
        read
            Returns the bytes of a file of the hop.
        peek
            Returns them unchecked, for files of which only the first bytes are read. None means `read`.
        """
        version = self.version
        if version is None or self.layout is None or version.digest != hop.base.digest:
            raise BaseMismatch(f"{hop.target.describe()} is relative to {hop.base.describe()}, which is not the version of the weights.")
        self._check_valid()
        update, difference = self._decode(version, hop, read, peek or read)
        while failed := self._rules.process(self.layout, update, self._direct_tensors.state):
            for name, error in failed.items():
                self.layout.load_anew(name, f"it cannot be processed while the server runs: {error}")
            update, difference = self._decode(version, hop, read, peek or read)  # again, because other changes must be known now
        target = LiveVersion(hop.target_ref, version.digest + difference)
        return StagedUpdate(hop, update if hop.files else None, version.digest, target, update.nbytes, update.unchecked)

    def _decode(self, version: LiveVersion, hop: DeltaHop, read: Read, peek: Read) -> tuple[LayoutUpdate, Digest]:
        """Return the changes of a hop, and the difference that they make to the digest of the whole state."""
        assert self.layout is not None
        decoders = self._decoders
        update = LayoutUpdate(
            self.layout,
            self._source,
            self._direct_tensors,
            threads=self._threads,
            decoders=decoders,
            pace=self._pace.after if self._pace.waits else None,
        )
        difference = Digest()
        self._pace.begin()
        for entry in hop.files:
            names = self._covered(entry)
            if decoders is not None and not decoders.includes(decoders.any_of(names)):
                before, after = delta_file.peek(peek(entry))  # other workers decode it; the digest of the target proves the sum
            else:
                before, after = update.add(names, read(entry))
                self._pace.between_files()
            difference += after - before
        update.complete()
        if version.digest + difference != hop.target.digest:
            raise ResultMismatch(f"the files of {hop.target.describe()} do not lead to its digest {hop.target.digest}.")
        return update, difference

    def swap(self, staged: StagedUpdate, agree: Agree) -> SwapOutcome:
        """Write a staged update, together with all other workers. Raises no exceptions, except interrupts.

        If anything else goes wrong than a step that is undone, the worker is quarantined: its weights may be a mix of two versions.

        Parameters
        ----------
        staged
            The update.
        agree
            Tells all workers whether this one has failed.
        """
        times: dict[str, float] = {}
        began = time.perf_counter()
        errors: list[str] = []
        outcome: Outcome = "quarantined"
        before, turned = self.version, staged.update if staged.is_back else None
        try:
            with noting(errors):
                if turned is not None:
                    turned.turn()
                outcome = make_swap(self, staged, agree, errors, times)
                if outcome == "made" and before is not None:
                    self.undo.note(staged, before)
                elif outcome == "refused" and turned is not None:
                    turned.turn()
        except BaseException:  # such as an interrupt in the middle of a write
            self.quarantine()
            raise
        times["total_ms"] = (time.perf_counter() - began) * 1e3
        if outcome == "quarantined":
            self.quarantine()
        for name, reason in ({} if staged.update is None else staged.update.unfit).items():
            assert self.layout is not None
            self.layout.refuse(name, reason)  # only now, because the rules of this update were needed to undo it
        return SwapOutcome(outcome, "; ".join(errors) or None, times)

    def check_direct(self) -> None:
        """Digest the direct tensors. Quarantines the worker and raises `EngineQuarantined` if they are not what the last swap wrote.

        A swap calls it by itself if that is quick. Otherwise `is_unconfirmed` is True, and it must be called afterwards.
        """
        with on_side_stream(self._direct_tensors.state) as wait:
            found = self._digest_direct()
            wait()
        if found != self._direct_digest:
            self.quarantine()
            raise EngineQuarantined(f"the weights in memory have digest {found}, not {self._direct_digest}.")
        self.is_unconfirmed = False

    def check_ready(self, staged: StagedUpdate) -> None:
        """Raise an error unless the weights are those that the update was made for, and can take it."""
        if self.is_quarantined or self.version is None or self.version.digest != staged.hop.base.digest:
            raise EngineRefused(f"the weights are not those of {staged.hop.base.describe()}, which the update was made for.")
        if self.is_unconfirmed:
            self.check_direct()
        if staged.update is not None and staged.update.loaded:
            self._check_valid()

    def _check_valid(self) -> None:
        if (reason := self.why_not) is not None:
            raise EngineRefused(f"the weights cannot be updated where they are: {reason}.")

    def _finish_writes(self) -> None:
        """Wait until a GPU has made all writes. Other workers may read this memory as soon as all have agreed."""
        assert self.layout is not None
        synchronize_streams(some_memory(self.layout.tensors))

    def write(self, update: LayoutUpdate, times: dict[str, float]) -> None:
        """Write the new values. Other workers may read this memory as soon as all have agreed, so the GPU has written when this returns."""
        with timed(times, "write_ms"):
            update.apply(digest=self._confirm == "auto" and self._is_quick)
            self._check_valid()  # while a GPU writes; the layout keeps the memory that it writes to, even if the model no longer uses it
            self._finish_writes()
        with timed(times, "recompute_ms"):
            self._rules.run(update)
            if update.recomputes:
                self._finish_writes()

    def write_back(self, update: LayoutUpdate) -> None:
        """Write the old values."""
        update.revert()
        self._rules.run(update)
        self._finish_writes()

    def check(self, update: LayoutUpdate, *, new: bool) -> None:
        """Raise `ResultMismatch` unless the weights are the new ones, or else exactly the old ones."""
        update.check(new=new)
        if not new or self._confirm == "everything" or (self._confirm == "auto" and self._is_quick):
            expected, found = self._direct_digest + update.direct_change if new else self._direct_digest, update.digest_direct()
            if found != expected:
                raise ResultMismatch(f"the tensors in checkpoint layout have digest {found} in memory, not {expected}.")
        if self._confirm == "everything" and self.layout is not None:
            found = Digest()
            for name, tensor in self.layout.tensors.items():
                if tensor.kind == "mapped":
                    found += state_digest({name: self.layout.gather(name)}, threads=self._threads)
            if found != (self._mapped_digest + update.mapped_change if new else self._mapped_digest):
                raise ResultMismatch("tensors that are not in checkpoint layout have wrong values in memory.")

    def note_made(self, staged: StagedUpdate) -> None:
        """Note that an update is written and confirmed."""
        self.version, update = staged.target, staged.update
        if update is not None:
            self._direct_digest += update.direct_change
            self._mapped_digest += update.mapped_change
            if self._source is not None:
                self._source.settled(self.version.ref, update.kept)
            self.is_unconfirmed = self._confirm == "written" or (self._confirm == "auto" and not self._is_quick)

    def _digest_direct(self) -> Digest:
        return state_digest(self._direct_tensors.state, threads=self._threads)

    def _hold_unreadable(self, layout: Layout) -> str | None:
        """Let the source get hold of the tensors that cannot be read from memory. Returns why that is impossible, or None."""
        wanted, absent = (
            {name: each.spec for name, each in layout.tensors.items() if each.kind in kinds and 0 not in each.spec.shape}
            for kinds in (("module", "partial"), ("absent",))
        )
        near = self._near(layout) & absent.keys()
        lost = sum(_nbytes(each.spec) for name, each in layout.tensors.items() if self._rules.is_lost(layout, name))
        reason = None
        if lost * 100 > sum(_nbytes(each.spec) for each in layout.tensors.values()):
            reason = f"they are {lost:,} bytes"  # nearly every update would change one of them, and be refused
        elif self._source is not None:
            reason = self._source.hold(wanted, absent, near)
        elif wanted or near:
            reason = "there is no other source for them"
        if reason is None:
            return None
        unread = wanted.keys() | near
        if not unread:
            return reason
        first = layout.tensors[min(unread)]
        return f"{len(unread)} tensors, such as {min(unread)!r}, cannot be read from memory ({first.reason or first.kind}), and {reason}"

    def _near(self, layout: Layout) -> frozenset[str]:
        """Return the tensors that can share a block of a file with one that this worker decodes. Those that it decodes are among them."""
        decoders = self._decoders
        if decoders is None:
            return frozenset(layout.tensors)
        specs = {name: (layout.tensors[name].spec.dtype, layout.tensors[name].spec.shape) for name in self._names}
        return frozenset(near_tensors(specs, lambda name: decoders.includes(decoders.bits[name])))

    def _digest_other(self, name: str) -> Digest:
        """Return the digest of what this worker owns of a tensor that is not direct."""
        assert self.layout is not None
        layout, owned = self.layout.tensors[name], self._owned[name]
        if layout.kind == "mapped":
            found = state_digest({name: self.layout.gather(name)}, threads=self._threads)
            self._mapped_digest += found
            return found if owned.blocks or name in self._unheld else Digest()
        if owned.blocks:
            found = state_digest({name: self.layout.gather(name, owned_only=True)}, threads=self._threads)
            return found if owned.has_first else found - TensorKeys.of([(name, layout.spec.dtype, layout.spec.shape)]).tag()
        if name not in self._unheld or self._rank:
            return Digest()
        return state_digest({name: base_of(layout, name, self._source)}, threads=self._threads)

    def _covered(self, entry: FileEntry) -> Sequence[str]:
        if entry.first is None or entry.count is None or entry.first + entry.count > len(self._names):
            raise ChainBroken(f"{entry.key} is said to cover tensors that the chain does not have.")
        return self._names[entry.first : entry.first + entry.count]


def _nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape, start=spec.dtype.itemsize)
