"""One update of weights that a worker holds in its own layout: decoded against them, written to them, and undone.

Most tensors are held as the checkpoint has them (`direct`): the codec decodes against the live memory and swaps values there. The others
are gathered into a temporary tensor in the layout of the checkpoint. Their changes are listed, located in the model's memory, and kept as
scatter lists. The temporary tensor is freed as soon as its file is decoded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch

from ....codec.base import Pace
from ....delta.patch import TensorPatch
from ....delta.plan import Plan, check_file, cover, itemsizes_of, resolve_plan, sizes_of
from ....delta.resolve import plan_delta
from ....delta.windows import Window, can_cut, cut_windows
from ....errors import BaseMismatch, CorruptDelta, ResultMismatch, TensorsTied
from ....format import delta_file
from ....format.delta_file import Coverage, DeltaBytes, DeltaFile, GroupedDelta
from ....format.digest import Digest, TensorKeys
from ....tensors.bits import TensorPart
from ....tensors.columns import Columns
from ....tensors.gpu_handover import on_side_stream
from ....tensors.state import codec_for, state_digest, thread_count
from ....tensors.torch_types import gpu_of, torch_dtype
from ..layout.types import ModuleRule, Scatter
from .direct_files import DirectFiles
from .direct_patches import DirectPatches
from .direct_tensors import DirectTensors
from .interfaces import BaseSource, Layout, ModuleLoad, base_of, inputs_of, some_memory
from .ownership import Decoders
from .scatter_lists import Changes, are_same, as_changes, merged, narrow, read_values, write_values

_WINDOW_BYTES = 256 << 20
"""The most bytes of a window, unless one block or tensor has more. Files with up to twice as many bytes in temporary memory are decoded
as a whole, because each window is a call of the codec, and publishers make files of this size.
"""

Base: TypeAlias = "torch.Tensor | TensorPart"
"""A tensor of the live version, or a part of it, in checkpoint layout."""


class LayoutUpdate:
    """The changes of one hop, decoded against live weights. `complete` must be called when all files are added.

    Parameters
    ----------
    layout
        How this worker holds the tensors.
    source
        Has the tensors that the worker cannot read from its own memory. None if there are none.
    direct
        The direct tensors of the layout.
    threads
        Number of threads for decoding on the host. None means one per core.
    decoders
        The workers that decode each tensor. None if there is one worker.
    pace
        Waits between parts of the work of a GPU. None if nothing waits.
    """

    def __init__(
        self,
        layout: Layout,
        source: BaseSource | None,
        direct: DirectTensors,
        *,
        threads: int | None = None,
        decoders: Decoders | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._layout = layout
        self._source = source
        self._direct_tensors = direct
        self._threads = thread_count(threads)
        self._tied = direct.tied
        self._decoders = decoders
        self._pace = pace
        self.unchecked = (Digest(), Digest())
        """Digests before and after of what only several workers together can check. The sums over all workers must be zero."""
        self._patches = DirectPatches(direct, threads=self._threads)
        """All changes that are swapped by a codec, also those of direct tensors whose files change other tensors too."""
        self._direct_files = DirectFiles(direct, self._patches, threads=self._threads, pace=pace)
        self._scatters: list[Scatter] = []
        self._loads: dict[str, ModuleLoad] = {}
        self._tied_changes: dict[str, list[Changes]] = {}
        self._coverage = Coverage()
        self.is_applied = False
        self.nbytes = 0
        """Memory that the update occupies."""
        self.changed = 0
        """The number of elements that the update changes."""
        self.touched: set[str] = set()
        """The tensors that change, without those that nothing else depends on."""
        self.recomputes: Sequence[ModuleRule] = ()
        """The rules of modules that are recomputed when the update is written."""
        self.kept: dict[str, list[TensorPatch]] = {}
        """The changes of tensors that came from the source. A tensor may change in several files."""
        self._input_changes: dict[str, list[Changes]] = {}
        """The changes of tensors that modules are processed from again."""
        self.direct_change = Digest()
        """The difference that the update makes to the digest of all direct tensors."""
        self.mapped_change = Digest()
        """The difference that it makes to the digest of all mapped tensors."""

    def add(self, names: Sequence[str], delta: DeltaBytes) -> tuple[Digest, Digest]:
        """Decode a file of a delta against the live weights. Changes nothing. Returns the digests of these tensors before and after.

        A GPU works on a separate stream, so that generation continues. It decodes several files of direct tensors at once: `complete`
        decodes the last ones, and raises their errors. Raises as `PreparedUpdate.add` does, and `EngineRefused` if the base of a tensor is
        missing. After an error the update must not be used.

        Parameters
        ----------
        names
            The tensors that the file covers, ascending.
        delta
            The bytes of the delta file.
        """
        file = delta_file.parse(delta, names=names, threads=False)  # the server needs the other cores
        if file.structure.added or file.structure.removed:
            raise CorruptDelta("the delta adds or removes tensors, but an update in memory can only change values.")
        bases = self._direct_tensors.part(names) if self._decoders is None else None
        if bases is not None and self._plain.issuperset(names):
            self._add_direct(plan_delta(bases, file))
            return file.before, file.after
        with on_side_stream(some_memory(self._layout.tensors)) as wait:
            if can_cut(file) and (windows := self._windows(names, file)):
                self._add_windows(names, file, windows)
            else:
                self._add_whole(names, file)
            wait()
        return file.before, file.after

    def complete(self) -> None:
        """Decode what is left, and free all memory that only `add` needs.

        Raises as `add` does, and `TensorsTied` if names that share memory change in different ways.
        """
        self._note_direct(self._direct_files.complete())
        for name, first in self._tied.items():
            one, other = (self._tied_changes.get(each, []) for each in (first, name))
            if not are_same(one, other):
                raise TensorsTied.of(first, name, changed=[each for each, found in ((first, one), (name, other)) if found])
        self._tied_changes.clear()
        self._coverage = Coverage()
        self._patches.complete()
        with on_side_stream(some_memory(self._layout.tensors)) as wait:
            self._scatters = merged(self._scatters)
            wait()

    def old_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the live version, in checkpoint layout and in new memory.

        Parameters
        ----------
        name
            The name of the tensor.
        """
        found = self._base(name)
        return found.clone() if self._layout.tensors[name].direct is not None else found

    def new_tensor(self, name: str) -> torch.Tensor:
        """Return an input of a module that is processed again, as the update makes it, in checkpoint layout and in new memory.

        Parameters
        ----------
        name
            An input of a module whose rule is "reprocess" or "load_anew".
        """
        found = self.old_tensor(name)
        for indices, values in self._input_changes.get(name, []):
            found.view(-1).view(values.dtype)[indices.to(found.device)] = values.to(found.device)
        return found

    def add_scatters(self, scatters: Sequence[Scatter]) -> None:
        """Add elements to write that were computed from the changes. No element may be among the changes themselves.

        Parameters
        ----------
        scatters
            Where they are, and their new values.
        """
        for scatter in scatters:
            scatter.old = read_values(scatter)  # not in the swap, because generation waits for that
            if scatter.half is not None:  # an element of packed weights has several units, of which few have changed
                changed = scatter.old != scatter.new
                scatter.indices, scatter.new, scatter.old = scatter.indices[changed], scatter.new[changed], scatter.old[changed]
            if len(scatter.indices):
                self._scatters.append(scatter)
                self.nbytes += scatter.indices.nbytes + 2 * scatter.new.nbytes

    def add_load(self, name: str, load: ModuleLoad) -> None:
        """Add a module that is loaded anew when the update is written.

        Parameters
        ----------
        name
            The name of the module.
        load
            The module, with its new weights.
        """
        self._loads[name] = load
        self.nbytes += load.nbytes

    @property
    def loaded(self) -> int:
        """The number of modules that are loaded anew."""
        return len(self._loads)

    @property
    def unfit(self) -> dict[str, str]:
        """Modules that cannot be loaded anew, with the reasons. It is known after `apply`."""
        return {name: load.unfit for name, load in self._loads.items() if load.unfit is not None}

    def forget_inputs(self) -> None:
        """Free what only `new_tensor` needs."""
        self._input_changes.clear()

    def apply(self, *, digest: bool = False) -> None:
        """Write the new values. After an error, `revert` restores the old ones. A GPU may still be at work when this returns.

        Parameters
        ----------
        digest
            True to digest the direct tensors in the same pass, if the codec can do so (`digest_direct`).
        """
        self.is_applied = True
        with torch.no_grad():
            for scatter in self._scatters:  # first, so that the digest shows a list that writes to other tensors
                write_values(scatter, scatter.new)
        self._patches.apply(digest=digest)
        for load in self._loads.values():
            load.apply()

    def revert(self) -> None:
        """Write the old values back, even if only some of the new ones were written. A GPU may still be at work when this returns."""
        self.is_applied = False
        self._patches.revert()
        with torch.no_grad():
            for scatter in reversed(self._scatters):
                assert scatter.old is not None
                write_values(scatter, scatter.old)
        for load in self._loads.values():  # last, because loading may have failed half-way
            load.revert()

    @property
    def can_turn(self) -> bool:
        """True if the update holds everything that it replaces, so that it can be turned."""
        return not self._loads and not self.kept

    def turn(self) -> None:
        """Let `apply` write the old values, and `revert` the new ones. All values must be written, or all written back."""
        self.is_applied = not self.is_applied
        self._patches.turn()
        for scatter in self._scatters:
            assert scatter.old is not None
            scatter.new, scatter.old = scatter.old, scatter.new
        self._scatters.reverse()
        self.direct_change, self.mapped_change = Digest() - self.direct_change, Digest() - self.mapped_change

    def digest_direct(self) -> Digest:
        """Return the digest of all direct tensors. Tensors that `apply` has digested are not read again."""
        return self._patches.digest()

    def check(self, *, new: bool) -> None:
        """Raise `ResultMismatch` unless the scattered elements have their new values, or else their old ones.

        The elements of direct tensors are not compared: a swapped patch has the values that it replaced. Their digest shows them.

        Parameters
        ----------
        new
            Whether they should have their new values.
        """
        with torch.no_grad():
            verdicts = [(read_values(scatter) == (scatter.new if new else scatter.old)).all() for scatter in self._scatters]
        if verdicts and not bool(torch.stack(verdicts).all()):
            raise ResultMismatch("some written elements have wrong values.")
        for load in () if new else self._loads.values():
            load.check_reverted()

    def _base(self, name: str) -> torch.Tensor:
        """Return a tensor of the live version in checkpoint layout: live memory, or a temporary."""
        layout = self._layout.tensors[name]
        if layout.direct is not None:
            return layout.direct
        if layout.kind == "mapped":
            return self._layout.gather(name)
        memory = next(iter(some_memory(self._layout.tensors).values()), None)
        return base_of(layout, name, self._source, device=torch.device("cpu") if memory is None else memory.device)

    def _windows(self, names: Sequence[str], file: GroupedDelta) -> Sequence[Window]:
        """Return the windows in which a file is decoded. There are none if it is decoded as a whole."""
        tensors, decoders = self._layout.tensors, self._decoders
        copied = sum(math.prod(tensors[name].spec.shape, start=tensors[name].spec.dtype.itemsize) for name in {*names} - self._plain)
        is_large = copied > 2 * _WINDOW_BYTES
        if not is_large and decoders is None:
            return ()
        specs = {name: (tensors[name].spec.dtype, tensors[name].spec.shape) for name in names}
        windows = list(cut_windows(file, specs, (lambda _: 1) if decoders is None else decoders.bits.__getitem__, _WINDOW_BYTES))
        is_divided = decoders is not None and _is_divided(windows, decoders)
        return windows if is_divided or is_large else ()

    def _add_whole(self, names: Sequence[str], file: DeltaFile) -> None:
        bases = self._direct_tensors.part(names) or {name: self._base(name) for name in names}
        plan = plan_delta(bases, file)
        if self._plain.issuperset(_names_of(plan)):
            self._add_direct(plan)
        else:
            cover(self._coverage, plan)
            self._add_mixed(plan, bases)

    def _add_direct(self, plan: Plan) -> None:
        """Decode a file of tensors that the codec writes by itself, now or later together with others."""
        cover(self._coverage, plan)
        self._note_direct(self._direct_files.add(plan))
        self.direct_change += plan.file.after - plan.file.before

    def _add_windows(self, names: Sequence[str], file: GroupedDelta, windows: Sequence[Window]) -> None:
        """Decode a file in windows, and leave out those that only other workers need."""
        decoders = self._decoders
        is_divided = decoders is not None and _is_divided(windows, decoders)
        before = after = Digest()
        wholes: dict[str, torch.Tensor] = {}
        for window in windows:
            if decoders is not None and not decoders.includes(window.decoders):
                continue
            wholes = {name: wholes[name] if name in wholes else self._base(name) for name in window.parts}
            bases = {name: _part(wholes[name], *part) for name, part in window.parts.items()}
            plan = plan_delta(bases, window.file)
            cover(self._coverage, plan)
            try:
                found = self._add_mixed(plan, bases, is_whole=False)
            except CorruptDelta as error:  # the file has its hash, so it was decoded against wrong weights
                raise BaseMismatch(f"the weights in memory are not those that the delta was made from: {error.message}") from error
            if decoders is None or not is_divided or decoders.is_first(window.decoders):
                before, after = before + found[0], after + found[1]
        specs = ((name, self._layout.tensors[name].spec) for name in names)
        tags = TensorKeys.of((name, spec.dtype, spec.shape) for name, spec in specs).tag() if file.file_parts is None else Digest()
        if decoders is None or not is_divided:
            check_file(file, before + tags, after + tags)
            return
        if decoders.is_first(decoders.any_of(names)):
            before, after = before - (file.before - tags), after - (file.after - tags)
        self.unchecked = self.unchecked[0] + before, self.unchecked[1] + after

    @functools.cached_property
    def _plain(self) -> frozenset[str]:
        """The direct tensors that the codec writes by itself."""
        apart = self._sharing | self._inputs
        return self._direct_tensors.at_one_position - apart if apart else self._direct_tensors.at_one_position

    @functools.cached_property
    def _sharing(self) -> frozenset[str]:
        """Names that share memory. Their changes must be known, because they are compared."""
        return frozenset(self._tied) | frozenset(self._tied.values())

    @functools.cached_property
    def _inputs(self) -> frozenset[str]:
        """Tensors that modules are processed or loaded from again. Their changes must be known."""
        return inputs_of(rule for rule in self._layout.modules.values() if rule.how in ("reprocess", "load_anew"))

    @functools.cached_property
    def _followed(self) -> frozenset[str]:
        """Direct tensors that modules depend on. Other direct tensors need not be named when they change, and there are thousands."""
        return inputs_of(self._layout.modules.values())

    def _add_mixed(self, plan: Plan, bases: Mapping[str, Base], *, is_whole: bool = True) -> tuple[Digest, Digest]:
        """Decode a file, and list the changes that the codec does not write. Returns the digests before and after.

        They are checked if the plan is that of a whole file.
        """
        codec = codec_for(plan.tensors)
        on_device = any(gpu_of(base.elements if isinstance(base, TensorPart) else base) is not None for base in bases.values())
        if on_device:  # the host's codec would keep what is not written, and lists take no more memory there
            plan.writes[:] = [name in self._plain for name in _names_of(plan)]
        resolution = codec.deferred_resolution(self._threads) if plan.writes.any() else codec.resolution(self._threads, 2**63)
        if is_whole:
            resolve_plan(plan, resolution, codec, self._threads, None)
            digests = plan.file.before, plan.file.after
        else:
            digests = plan.resolve(resolution, codec, self._threads, None)
        listed = np.flatnonzero((plan.changed[: len(plan.tensors)] > 0) & ~plan.writes).tolist()
        found = resolution.changes(plan.numbers[listed].tolist())
        temporary = {name: bases[name] for name in {plan.tensors[number].name for number in listed} if not self._is_direct(name)}
        mapped = {name: tensor for name, tensor in temporary.items() if self._layout.tensors[name].kind == "mapped"}
        before, mapped_before = (state_digest(each, threads=self._threads) for each in (temporary, mapped))
        for number, (indices, bits) in zip(listed, found, strict=True):
            tensor = plan.tensors[number]
            self._add_changes(tensor.name, as_changes(indices, bits, tensor.start), temporary.get(tensor.name))
        after, mapped_after = (state_digest(each, threads=self._threads) for each in (temporary, mapped))
        self.mapped_change += mapped_after - mapped_before
        self.direct_change += digests[1] - digests[0] - (after - before)
        if plan.writes.any():
            self._patches.add(resolution, [plan])
        self._count([plan])
        self._touch(plan)
        if on_device and self._pace is not None:
            self._pace(int(sizes_of(plan.tensors).sum()))
        return digests

    def _is_direct(self, name: str) -> bool:
        return self._layout.tensors[name].direct is not None

    def _add_changes(self, name: str, changes: Changes, temporary: Base | None) -> None:
        """Keep the changes of a tensor as scatter lists, and make them in its temporary copy."""
        layout, (indices, values) = self._layout.tensors[name], changes
        if isinstance(temporary, TensorPart):
            temporary.elements.view(values.dtype)[indices - temporary.start] = values
        elif temporary is not None:
            flat = temporary.reshape(-1).view(values.dtype)
            flat[indices] = values
        if layout.kind in ("module", "absent", "partial") and self._source is not None and self._source.writes(name):
            at, new = narrow(indices, math.prod(layout.spec.shape)).cpu(), values.cpu().view(torch_dtype(layout.spec.dtype))
            self.kept.setdefault(name, []).append(TensorPatch(at, new, layout.spec.shape))
        if name in self._inputs:
            self._input_changes.setdefault(name, []).append(changes)
        if name in self._sharing:
            self._tied_changes.setdefault(name, []).append(changes)
        if name in self._direct_tensors.repeated:
            return
        if layout.direct is not None and len(layout.placements) <= 1:
            memory = layout.direct.detach().reshape(-1).view(values.dtype)
            scatters = [Scatter(memory, narrow(indices, memory.numel()), values)]
        else:
            scatters = self._layout.locate(name, indices, values)
        self.add_scatters(scatters)

    def _note_direct(self, plans: Sequence[Plan]) -> None:
        """Note what changes, once plans of tensors that the codec writes are decoded."""
        if plans:
            self._count(plans)
        for plan in plans if self._followed else ():
            if not self._followed.isdisjoint(_names_of(plan)):
                self._touch(plan)

    def _touch(self, plan: Plan) -> None:
        """Note the tensors that change, once a plan is decoded."""
        names = _names_of(plan)
        self.touched.update(map(names.__getitem__, np.flatnonzero(plan.changed[: len(plan.tensors)]).tolist()))

    def _count(self, plans: Sequence[Plan]) -> None:
        """Add up what changes, once plans are decoded."""
        changed = np.concatenate([plan.changed[: len(plan.tensors)] for plan in plans])
        written = np.where(np.concatenate([plan.writes for plan in plans]), changed, 0)
        self.changed += int(changed.sum())
        self.nbytes += int((written * (4 + np.concatenate([itemsizes_of(plan.tensors) for plan in plans]))).sum())


def _is_divided(windows: Sequence[Window], decoders: Decoders) -> bool:
    """Return whether any worker leaves out any window. All workers give the same answer."""
    return any(window.decoders != decoders.everyone for window in windows)


def _part(whole: torch.Tensor, start: int, stop: int) -> TensorPart:
    return TensorPart(whole.reshape(-1)[start:stop], tuple(whole.shape), start)


def _names_of(plan: Plan) -> Sequence[str]:
    """Return the names of the tensors of a plan. A name can be there several times, for parts of a tensor."""
    return plan.tensors.layout.names if isinstance(plan.tensors, Columns) else [tensor.name for tensor in plan.tensors]
