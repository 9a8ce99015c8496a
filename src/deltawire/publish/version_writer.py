"""The steps from an accepted state to a version: check the weights, append the version, then make shortcuts."""

from __future__ import annotations

from dataclasses import replace

from ..chain.version import Version
from ..errors import Fenced
from ..events import OnEvent, emit
from ..telemetry.trace_context import traced
from ..tensors.columns import in_columns
from .append import Appender
from .publication import Publication
from .publish_warnings import Advice
from .shortcuts.upkeep import Upkeep
from .snapshots import SnapshotMemory


class VersionWriter:
    """Writes versions, one at a time. It does not know whether its caller is the training thread or a background thread.

    A failed publication emits the event "publish-failed", gives its memory back and raises. Shortcuts that fail are only reported.
    """

    def __init__(self, appender: Appender, upkeep: Upkeep, advice: Advice, memory: SnapshotMemory, on_event: OnEvent | None) -> None:
        self._appender = appender
        self._upkeep = upkeep
        self._advice = advice
        self._memory = memory
        self._on_event = on_event
        self._last_error: BaseException | None = None

    @property
    def last_error(self) -> BaseException | None:
        """The last error, including errors of shortcuts, which are not raised."""
        return self._last_error or self._upkeep.last_error

    def write(self, publication: Publication) -> Version:
        """Append a version to the chain and return it. Raises as `Appender.append` does, and `NonFiniteWeights`."""
        try:
            if publication.layout is None:
                publication = replace(publication, weights=in_columns(publication.weights))
            if publication.recipe is None:  # weights that are quantised are checked meanwhile
                self._advice.check_finite(publication.weights)
            version = self._appender.append(publication)
        except BaseException as error:
            self._last_error = error
            if not isinstance(error, Fenced):
                trace = traced(publication.meta)
                emit(self._on_event, "publish-failed", step=publication.step, error=type(error).__name__, reason=str(error), **trace)
            raise
        finally:
            if publication.is_owned and not self._appender.needs(publication.weights):
                self._memory.give_back(dict(publication.weights))
        self._advice.after(version, publication.table)
        return version

    def follow_up(self) -> None:
        """Make the shortcuts that are due after the version that was just written."""
        self._upkeep.after_append()
