"""The writer of a chain: it claims an epoch, fences earlier writers, and appends commits (docs/protocol.md §4)."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ..chain.log import ChainLog
from ..errors import (
    ChainBroken,
    CommitOutcomeUnknown,
    CorruptRecord,
    DataDamaged,
    Fenced,
    LimitExceeded,
    OutcomeUnknown,
    PublishError,
    RunMismatch,
    SignatureInvalid,
    StoreError,
)
from ..events import OnEvent, emit
from ..format.digest import Digest
from ..format.records.canonical import MAX_INTEGER, MAX_RECORD_BYTES
from ..format.records.file_list import FileListRef
from ..format.records.record_parts import MAX_EPOCH, CommitRef, FileEntry, Limits, RecipeRecord, link_targets, record_hash
from ..format.records.run_records import Epoch, Head, Run
from ..format.records.signing import SigningKey, check_signature
from ..format.records.version_records import Commit
from ..store import keys
from ..store.base import Store
from ..store.create_rule import create_and_look
from ..store.urls import default_run_name
from ..telemetry.trace_context import traced
from .writer_options import WriterOptions

Clock = Callable[[], float]
Sleep = Callable[[float], None]


@dataclass(slots=True)
class Attempt:
    """A commit that is being created, with its bytes.

    `doubt` is set when the record may have been created but the outcome is unknown; `landed` is set when it is known to be in the chain.
    """

    commit: Commit
    data: bytes
    doubt: bool = False
    landed: bool = False

    @property
    def ref(self) -> CommitRef:
        return self.commit.ref(record_hash(self.data))


def open_run(store: Store, name: str | None, limits: Limits, *, clock: Clock = time.time, sleep: Sleep = time.sleep) -> Run:
    """Read the run at a store, or begin one. Raises `RunMismatch` if the run has another name than `name`.

    `limits` are those of a new run; an existing run keeps its own. The default name of a new run is made from its URL.
    """
    new = Run(name or default_run_name(store.url), secrets.token_hex(16), int(clock() * 1000), limits)
    try:
        data = new.to_bytes()
    except CorruptRecord as error:
        raise PublishError(f"{new.run!r} cannot name a run: {error.message}") from None
    run = Run.parse(create_and_look(store, keys.RUN, data, sleep=sleep))
    if name is not None and run.run != name:
        raise RunMismatch(f"{store.url} holds the run {run.run!r}, not {name!r}. Give every run a different URL.")
    return run


_SIGN_AS_BEFORE = (
    "Sign with the key that signed the chain: `--sign KEYFILE`, or `WriterOptions(signing_key=…)`. "
    "To change keys, sign with the new one and trust the old one (`--trust`, `trusted_keys`)."
)


def open_log(store: Store, run: str | None, options: WriterOptions) -> ChainLog:
    """Return the chain as a writer with these options reads it. Writes nothing.

    A chain is signed from its beginning or not at all, because readers that trust its keys could not follow it otherwise. Therefore this
    raises `SignatureInvalid` in two cases: the writer signs, and the chain is unsigned or signed by a key that `options` does not name;
    or the writer does not sign, and the chain is signed.
    """
    log = ChainLog(store, run=run, trusted_keys=options.accepted_keys)
    try:
        head = log.head()
        if head is not None:
            log.read(0)  # links will lead down to it, and to others in between
    except SignatureInvalid as error:
        raise SignatureInvalid(error.message, hint=_SIGN_AS_BEFORE) from None
    if head is not None and head.signature is not None and options.signing_key is None:
        raise SignatureInvalid(f"{head.describe()} in {store.url} is signed, so an unsigned one must not follow it.", hint=_SIGN_AS_BEFORE)
    return log


class ChainWriter:
    """Appends commits as the writer of one epoch. It is not thread-safe.

    Construction claims the epoch and commits a fence. From then on, commits that earlier writers append are void. `tip` is the newest
    commit that is in force. Once it has raised `Fenced`, it raises it at every call.
    """

    def __init__(
        self,
        store: Store,
        log: ChainLog,
        *,
        signing_key: SigningKey | None = None,
        resumed_from: int | None = None,
        clock: Clock = time.time,
        sleep: Sleep = time.sleep,
    ) -> None:
        self.store = store
        self.log = log
        self._key = signing_key
        self._clock = clock
        self._sleep = sleep
        self._fenced: str | None = None
        self._hashes: dict[int, tuple[int, str]] = {}
        """For every power of two, by its exponent: the newest seq that it divides, and the hash of that commit. Links need these."""
        self.run = log.run
        claimed = log.highest_epoch()
        self.epoch = self._claim(claimed, resumed_from)
        head = log.head()
        self._head = None if head is None else (head.seq, log.hash(head.seq))
        # Epochs never decrease, so a head of the highest claimed epoch cannot be void. For other heads, the log has to look further back.
        self._tip = None if head is None else head if head.epoch == claimed else log.in_force(head)
        self._tip_hash = None if self._tip is None else log.hash(self._tip.seq)
        if self._tip is not None and self._tip.epoch > self.epoch:
            self._halt(f"epoch {self._tip.epoch} took over while epoch {self.epoch} was being claimed.")
        self.fence = self._land_fence()

    @property
    def in_force(self) -> Commit | None:
        """The version that is in force after this writer's fence. None if nothing was published before."""
        return None if self.fence.state_seq is None else self.log.state_commit(self.fence)

    @property
    def tip(self) -> CommitRef:
        """The newest commit in force, which the next delta applies to."""
        assert self._tip is not None
        assert self._tip_hash is not None  # there is at least our own fence
        return self._tip.ref(self._tip_hash)

    @property
    def next_seq(self) -> int:
        """The seq of the next commit."""
        return 0 if self._head is None else self._head[0] + 1

    def propose(
        self,
        kind: str,
        *,
        base: CommitRef | None,
        digest: Digest | None,
        state_bytes: int,
        tensors: int,
        changed: int = 0,
        files: Sequence[FileEntry] = (),
        file_list: FileListRef | None = None,
        attachments: Sequence[FileEntry] = (),
        step: int | None = None,
        meta: Mapping[str, str] | None = None,
        recipe: RecipeRecord | None = None,
    ) -> Attempt:
        """Prepare the next commit, and write nothing yet. Raises `LimitExceeded` if this run does not allow such a record.

        With a `file_list`, which must be uploaded, the record does not name the files.
        """
        self.check_fenced()
        seq = self.next_seq
        updates = 0 if self._tip is None else self._tip.updates
        state_seq = seq if kind != "fence" else None if self._tip is None else self._tip.state_seq
        commit = Commit(
            id=self.run.id,
            seq=seq,
            epoch=self.epoch,
            nonce=secrets.token_hex(16),
            kind=kind,
            parent=None if self._head is None else self._head[1],
            links=self._links(seq),
            base=base,
            state_seq=state_seq,
            updates=updates if kind == "fence" else updates + 1,
            digest=digest,
            state_bytes=state_bytes,
            tensors=tensors,
            changed=changed,
            step=step,
            time=int(self._clock() * 1000),
            files=tuple(files) if file_list is None else (),
            meta=dict(meta or {}),
            run=self.run.run,
            attachments=tuple(attachments),
            recipe=recipe,
            file_list=file_list,
        )
        self.run.limits.check(commit)
        return self._attempt(commit)

    def land(self, attempt: Attempt) -> None:
        """Create the commit. On return it is in the chain. It may be called again for the same attempt, even after an interruption.

        Raises `Fenced` if another writer has taken over. Raises `CommitOutcomeUnknown` if the commit may be in the chain; call it again
        with the same attempt before you propose another. After any other error the commit is not in the chain, and never will be.
        """
        self.check_fenced()
        while not attempt.landed:
            seq = attempt.commit.seq
            if self._head is not None and seq <= self._head[0]:  # interrupted after the seq was found to be taken
                if self._head == (seq, record_hash(attempt.data)):
                    attempt.landed = True
                else:
                    self._move_on(attempt)
                continue
            doubt, attempt.doubt = attempt.doubt, True  # the call may be interrupted at any moment
            try:
                found = create_and_look(self.store, keys.commit_key(seq), attempt.data, doubt=doubt, sleep=self._sleep)
            except OutcomeUnknown as error:
                raise CommitOutcomeUnknown(f"commit {seq} may or may not have landed: {error}") from error
            if found != attempt.data and Commit.parse(found).epoch >= self.epoch:
                found = self._read_again(seq)
            if found == attempt.data:
                self._advance(attempt.commit, record_hash(found), in_force=True)
                attempt.landed = True
            else:
                self._yield_seq(found, attempt)

    def _read_again(self, seq: int) -> bytes:
        """Read a commit again. Halting is final, so it must not happen because of a bit that flipped in transit."""
        try:
            return self.store.get(keys.commit_key(seq), limit=MAX_RECORD_BYTES)
        except (StoreError, DataDamaged, LimitExceeded) as error:
            raise CommitOutcomeUnknown(f"it is not known which publisher made commit {seq}: {error}") from error

    def check_fenced(self) -> None:
        """Raise `Fenced` if it was raised before."""
        if self._fenced is not None:
            raise Fenced(self._fenced)

    def put_head(self) -> None:
        """Tell readers where the head is. It is only a hint, so it may fail."""
        assert self._head is not None
        try:
            self.store.put(keys.HEAD, Head(self._head[0]).to_bytes(), durable=False)
        except StoreError:
            return

    def _yield_seq(self, found: bytes, attempt: Attempt) -> None:
        """Handle another writer's commit at the seq of our attempt: halt, or try the next seq."""
        other = Commit.parse(found)
        if other.seq != attempt.commit.seq or other.id != self.run.id:
            raise CorruptRecord(f"the record of commit {attempt.commit.seq} in {self.store.url} is commit {other.seq} of run {other.id}.")
        if other.epoch > self.epoch:
            self._halt(f"another publisher (epoch {other.epoch}) has taken over from this one (epoch {self.epoch}).")
        if other.epoch == self.epoch:
            self._halt(f"another publisher has made commit {other.seq} in this publisher's epoch {self.epoch}.")
        check_signature(other, self.log.trusted_keys)
        # It has a lower epoch: it is void after our fence. Before our fence it is valid, unless an earlier fence has made it void.
        fencing = attempt.commit.kind == "fence"
        self._advance(other, record_hash(found), in_force=fencing and (self._tip is None or other.epoch >= self._tip.epoch))
        self._move_on(attempt)

    def _move_on(self, attempt: Attempt) -> None:
        """Change the attempt to the next seq, with another parent and nonce, and perhaps another base for a fence."""
        assert self._head is not None
        if attempt.commit.kind == "fence":
            moved = self._fence_attempt()
        else:
            seq, nonce = self.next_seq, secrets.token_hex(16)
            moved = self._attempt(
                dataclasses.replace(
                    attempt.commit, seq=seq, state_seq=seq, nonce=nonce, parent=self._head[1], links=self._links(seq), signature=None
                )
            )
        attempt.commit, attempt.data, attempt.doubt = moved.commit, moved.data, False

    def _attempt(self, commit: Commit) -> Attempt:
        signed = commit if self._key is None else self._key.sign(commit)
        return Attempt(signed, signed.to_bytes())

    def _land_fence(self) -> Commit:
        attempt = self._fence_attempt()
        self.land(attempt)
        return attempt.commit

    def _fence_attempt(self) -> Attempt:
        tip = self._tip
        if tip is None or tip.digest is None:
            return self.propose("fence", base=None, digest=None, state_bytes=0, tensors=0)
        return self.propose("fence", base=self.tip, digest=tip.digest, state_bytes=tip.state_bytes, tensors=tip.tensors)

    def _claim(self, highest: int, resumed_from: int | None) -> int:
        """Claim the next epoch. The listing may be out of date, so higher numbers are tried until one is free."""
        epoch = highest + 1
        while True:
            if epoch > MAX_EPOCH:  # publishers never count that far, so something else made this object
                raise ChainBroken(f"{keys.epoch_key(epoch - 1)} in {self.store.url} leaves no number for another epoch.")
            record = Epoch(self.run.id, epoch, secrets.token_hex(16), int(self._clock() * 1000), resumed_from)
            claim = (record if self._key is None else self._key.sign(record)).to_bytes()
            if create_and_look(self.store, keys.epoch_key(epoch), claim, sleep=self._sleep) == claim:
                return epoch
            epoch += 1

    def _links(self, seq: int) -> tuple[tuple[int, str], ...]:
        links = []
        for exponent, target in enumerate(link_targets(seq), 1):
            known = self._hashes.get(exponent)
            links.append((target, known[1] if known is not None and known[0] == target else self.log.hash(target)))
        return tuple(links)

    def _advance(self, commit: Commit, commit_hash: str, *, in_force: bool) -> None:
        if in_force:
            self._tip, self._tip_hash = commit, commit_hash
        for exponent in range(1, (commit.seq & -commit.seq).bit_length() if commit.seq else 64):  # every power of two divides 0
            self._hashes[exponent] = commit.seq, commit_hash
        self._head = commit.seq, commit_hash

    def _halt(self, why: str) -> NoReturn:
        self._fenced = why
        raise Fenced(why)


def emit_published(on_event: OnEvent | None, commit: Commit, **seconds: float) -> None:
    """Emit the event that a version is in the chain, with the seconds of each phase."""
    emit(
        on_event,
        "published",
        seq=commit.seq,
        kind=commit.kind,
        step=commit.step,
        epoch=commit.epoch,
        updates=commit.updates,
        bytes=commit.stored_bytes,
        state_bytes=commit.state_bytes,
        changed=commit.changed,
        ratio=commit.state_bytes / commit.stored_bytes if commit.stored_bytes else None,
        **seconds,
        **traced(commit.meta),
    )


def check_meta(meta: Mapping[str, str] | None) -> dict[str, str]:
    """Return the user's strings. Raises TypeError if they are not strings, and `LimitExceeded` if a record has no room for them."""
    found = dict(meta or {})
    if not all(isinstance(key, str) and isinstance(value, str) for key, value in found.items()):
        raise TypeError("meta maps strings to strings")
    size = sum(len(ascii(key)) + len(ascii(value)) + 4 for key, value in found.items())
    if size > MAX_RECORD_BYTES // 8:
        raise LimitExceeded(f"meta has about {size:,} bytes; {MAX_RECORD_BYTES // 8:,} are allowed.")
    return found


def check_step(step: object) -> None:
    """Raise TypeError unless it can be the step of a commit."""
    if step is not None and (type(step) is not int or not 0 <= step <= MAX_INTEGER):
        raise TypeError(f"step must be an integer from 0 to 2^63-1, or None, not {step!r}")
