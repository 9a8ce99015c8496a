"""Compares a checkpoint with the chain before `deltawire publish` takes the run over. Writes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..chain.attachments import attachments_of
from ..chain.fetch import Fetcher
from ..chain.find import newest_version
from ..chain.log import ChainLog
from ..chain.memory_state import MemoryState
from ..chain.routes.rebuild import rebuild
from ..chain.routes.remaining_routes import Routes
from ..chain.routes.restore import fetched_hops
from ..delta.encode import encode_with_summary
from ..errors import NoChain, RecipeMissing
from ..events import emit
from ..format.checkpoints.shard_layout import LAYOUT_FILE
from ..format.content_hash import content_hash
from ..format.records.record_parts import Limits, RecipeRecord
from ..publish.attachments.quantised_config import CONFIG
from ..publish.attachments.read_files import read_attachments
from ..publish.publish_warnings import Advice, continues
from ..publish.quantising import QuantisedConfig, Quantising, quantise
from ..publish.resume import read_table
from ..publish.upload.segments import TensorTable
from ..quantise.recipe import Recipe
from ..store.occupancy import refuse_occupied
from ..tensors.state import state_digest

if TYPE_CHECKING:
    from ..events import OnEvent
    from ..format.checkpoints.checkpoint import Checkpoint
    from ..format.records.version_records import Commit
    from ..tensors.bits import State


@dataclass(frozen=True, slots=True)
class Forecast:
    """The version that would be published. `bytes` is about the size of its files; `base` is the number of the version it builds on."""

    version: int
    kind: str
    base: int | None
    bytes: int
    changed: int
    files: list[str]
    """The attachments that are new or changed."""

    @property
    def is_same(self) -> bool:
        return self.kind == "delta" and not self.changed and not self.files


class PublishedForm:
    """The tensors that are published for a checkpoint: its weights, or the codes and scales that a recipe makes.

    Raises a `TensorError` if the weights cannot be published.

    Parameters
    ----------
    state
        The checkpoint.
    recipe
        The recipe; None publishes the weights as they are.
    """

    def __init__(self, state: Checkpoint, recipe: Recipe | None) -> None:
        self.state = state
        self._quantising = None if recipe is None else Quantising(recipe, None)
        self.layout = None if self._quantising is None else self._quantising.layout_of(state)
        """The tensors that the recipe makes; None if the weights are not quantised."""
        self.table = TensorTable.of(state) if self._quantising is None or self.layout is None else self._quantising.table_of(self.layout)
        """The names, types and shapes of the published tensors."""

    @property
    def elements(self) -> int:
        """The number of weights of the checkpoint."""
        return sum(map(math.prod, self.table.shapes if self.layout is None else (spec.shape for spec in self.layout.specs.values())))

    @property
    def quantised(self) -> int:
        """How many of these weights the recipe quantises."""
        return 0 if self.layout is None else sum(weight.rows * weight.columns for weight in self.layout.weights)

    @property
    def record(self) -> RecipeRecord | None:
        """The recipe as commits name it; None if the weights are not quantised."""
        return None if self._quantising is None else self._quantising.record

    def files(self, attached: Mapping[str, bytes | Path] | None) -> dict[str, bytes | Path] | None:
        """Return the files to publish with the weights. The checkpoint's own layout of weights does not fit quantised ones."""
        if attached is None or self.layout is None or self._quantising is None:
            return None if attached is None else dict(attached)
        found = {name: content for name, content in attached.items() if name != LAYOUT_FILE}
        if CONFIG in found:
            config = read_attachments({CONFIG: found[CONFIG]}) or {}
            found |= QuantisedConfig(self._quantising, None).written_into(config, self.layout)
        return found

    def weights(self, before: State | None, recipe_before: RecipeRecord | None) -> State:
        """Return the published tensors. Those of the version before, and its recipe, give the scales."""
        if self.layout is None:
            return self.state
        return quantise(self.layout, self.table.names, self.state, before if continues(self.record, recipe_before) else None)


def refuse_above_limits(log: ChainLog, table: TensorTable) -> None:
    """Raise `LimitExceeded` if the run does not allow tensors of these types and shapes."""
    try:
        limits = log.limits
    except NoChain:
        limits = Limits()
    table.check_limits(limits)


def refuse_without_recipe(before: Commit | None, *, is_given: bool) -> None:
    """Raise `RecipeMissing` if the version before is quantised, and the user did not say whether the next one is.

    Parameters
    ----------
    before
        The version that the next one follows; None if there is none.
    is_given
        Whether the user passed `--quantise`.
    """
    if before is not None and before.recipe is not None and not is_given:
        raise RecipeMissing(
            f"version {before.updates} of this chain is quantised by {before.recipe}, and you did not pass --quantise. "
            "Nothing is published."
        )


def newest_if_same(log: ChainLog, form: PublishedForm, attached: Mapping[str, bytes | Path] | None, threads: int | None) -> Commit | None:
    """Return the newest version if it has these weights and these attachments already.

    Reads no weights of the chain, unless these weights are quantised: their scales depend on those of the chain.
    """
    newest = newest_or_none(log)
    if newest is None or not continues(form.record, newest.recipe) or changed_files(log, newest, attached):
        return None
    before = None if form.record is None else _read_back(log, newest, threads, None)
    return newest if newest.digest == state_digest(form.weights(before, newest.recipe), threads=threads) else None


def forecast(
    log: ChainLog,
    form: PublishedForm,
    attached: Mapping[str, bytes | Path] | None,
    base: Commit | None,
    *,
    step: int | None,
    full: bool,
    threads: int | None,
    on_event: OnEvent | None,
) -> Forecast:
    """Compare a checkpoint with a version, and return what would be published.

    Parameters
    ----------
    log
        The chain.
    form
        What is published of the checkpoint.
    attached
        The files to publish with it; None keeps those of the version before.
    base
        The version to compare with; None takes the newest.
    step
        The step to publish it with.
    full
        Whether a full checkpoint was asked for.
    threads
        The number of threads; None uses one per core.
    on_event
        Gets the events of reading the version back, and the warnings that the publisher would give.
    """
    advice = Advice(on_event, has_dtype=True, refuse_nonfinite=False)
    if form.layout is not None:
        advice.check_quantised(form.layout)
    newest = newest_or_none(log)
    if newest is None:
        refuse_occupied(log.store)
        return Forecast(1, "anchor", None, form.table.state_bytes, 0, sorted(attached or ()))
    base = base or newest
    is_rewound = base.seq != newest.seq
    files = changed_files(log, base, attached)
    version = newest.updates + (2 if is_rewound else 1)
    advice.follows(None, None if is_rewound else base.step)
    advice.check_step(step)
    advice.follows_recipe(base.recipe)
    is_other_recipe = advice.check_recipe(form.record)
    table = form.table
    if full or is_other_recipe:
        advice.follows(None if is_other_recipe else read_table(log, base), None)
        advice.check_layout(table)
        return Forecast(version, "anchor", None, table.state_bytes, 0, files)
    before = _read_back(log, base, threads, on_event)
    table_before = TensorTable.of(before)
    advice.follows(table_before, None)
    advice.check_layout(table)
    if table == table_before:
        delta, summary = encode_with_summary(before, form.weights(before, base.recipe), threads=threads)
        if len(delta) < table.state_bytes or not summary.changed:
            return Forecast(version, "delta", base.updates, len(delta), summary.changed, files)
    return Forecast(version, "anchor", None, table.state_bytes, 0, files)


def _read_back(log: ChainLog, commit: Commit, threads: int | None, on_event: OnEvent | None) -> State:
    """Return the weights of a version."""
    state = MemoryState(threads=threads)
    routes = Routes(log, on_event=on_event)
    hops = routes.find(None, commit)
    size = sum(entry.size for hop in hops for entry in hop.files)
    emit(on_event, "planned", seq=commit.seq, updates=commit.updates, hops=fetched_hops(hops), bytes=size)
    rebuild(state, log, Fetcher(log.store, limits=log.limits, on_event=on_event), commit, routes=routes)
    return state


def newest_or_none(log: ChainLog) -> Commit | None:
    """Return the commit that made the newest version; None if there is none yet. Raises `RunMismatch` if the run has another name."""
    try:
        log.run  # noqa: B018 - this compares its name with the one that was asked for
        return log.state_commit(newest_version(log))
    except NoChain:
        return None


def changed_files(log: ChainLog, commit: Commit, attached: Mapping[str, bytes | Path] | None) -> list[str]:
    """Return the names of attachments that differ from those of a version, or that only one of the two has."""
    if attached is None:
        return []
    named = commit.attachments if commit.attachments is not None else attachments_of(commit, Routes(log).find(None, commit)[0])
    there = {str(entry.name): entry.blake3 for entry in named}
    here = {name: content_hash(content.read_bytes() if isinstance(content, Path) else content) for name, content in attached.items()}
    return sorted(name for name in {*there, *here} if there.get(name) != here.get(name))
