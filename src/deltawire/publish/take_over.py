"""How a writer takes a chain over: it checks everything first, and only then excludes earlier writers."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ObjectMissing, RelayConflict
from ..events import OnEvent
from ..store import Store, keys, probe
from ..store.occupancy import refuse_occupied
from .attachments.read_files import check_sizes
from .attachments.stored_files import AttachedFiles, StoredFiles
from .commits import ChainWriter, open_log, open_run
from .resume import check_seq, find_start
from .writer_options import WriterOptions


class TakeOver:
    """Opens the run at a store, or begins one, and finds the version that the writer continues from.

    Construction and `require_files` write nothing to an existing chain, so an error there leaves the present writer undisturbed. `fence`
    excludes all earlier writers.

    Parameters
    ----------
    store
        The location of the chain.
    run
        The name that the run must have, or the name of a new run.
    options
        The options of the writer.
    files
        The attachments that the writer was given, by name.
    keeps_others
        Whether attachments of the version before stay if the writer is not given files of their names.
    resume_from_seq
        The seq of the version to go back to. None: the newest.
    """

    def __init__(
        self,
        store: Store,
        run: str | None,
        options: WriterOptions,
        *,
        files: Mapping[str, bytes],
        keeps_others: bool,
        resume_from_seq: int | None,
    ) -> None:
        check_seq(resume_from_seq)
        refuse_occupied(store)
        refuse_copy(store)
        probe(store)
        open_run(store, run, options.limits)
        self._store = store
        self._options = options
        self._files = files
        self._keeps_others = keeps_others
        self._resume_from_seq = resume_from_seq
        self.log = open_log(store, run, options)
        check_sizes(files, self.log.limits)
        self._stored = StoredFiles(self.log, files)
        self.start = find_start(self.log, resume_from_seq)
        """The version to continue from. None if nothing is published yet."""

    def require_files(self) -> None:
        """Raise `DataDamaged` or `DataMissing` if the next version needs a stored attachment that is damaged and was not given."""
        if self.start is not None:
            attached = AttachedFiles(self.log, self.start, self._stored, keeps_others=self._keeps_others)
            attached.require(self._files, rewinds=self._resume_from_seq is not None)

    def read_file(self, name: str) -> bytes | None:
        """Return an attachment of the version that the writer continues from. None if there is none of this name.

        Raises as `Fetcher.fetch` does.
        """
        if self.start is None:
            return None
        return AttachedFiles(self.log, self.start, self._stored).read(name)

    def fence(self) -> ChainWriter:
        """Exclude earlier writers, and return the writer of the new epoch."""
        return ChainWriter(self._store, self.log, signing_key=self._options.signing_key, resumed_from=self._resume_from_seq)

    def attached(self, writer: ChainWriter, on_event: OnEvent | None) -> AttachedFiles:
        """Return the attachments that are in force when `writer` starts."""
        return AttachedFiles(self.log, writer.in_force, self._stored, keeps_others=self._keeps_others, on_event=on_event)


def refuse_copy(store: Store) -> None:
    """Raise `RelayConflict` if relays write to this location. A version that is published here would never reach the origin's readers."""
    try:
        store.head(keys.COPY)
    except ObjectMissing:
        return
    raise RelayConflict(
        f"{store.url} is a copy that relays write, so nothing can be published there.",
        hint=f"Publish to the origin. If the origin is lost and this copy replaces it, end its relays and delete {keys.COPY} here.",
    )
