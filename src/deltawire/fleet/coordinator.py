"""The trainer's side of a fleet over a real store."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ..chain.log import ChainLog
from ..chain.version import Version
from ..errors import DeltawireError, FleetTimeout, SignatureInvalid, StoreError
from ..events import OnEvent, emit
from ..format.records.fleet_files import Row
from ..format.records.signing import SigningKey
from ..format.records.trainer_records import Round, Sampling
from ..store import Store, StoreOptions, open_store
from .batch import Batch
from .chain_versions import ChainVersions
from .fleet_keyring import FleetKeyring
from .options import FleetOptions
from .rules.admission import Reason
from .rules.roster import MemberStatus
from .rules.scheduler import Scheduler
from .rules.staleness import KnownVersion, StalenessBudget
from .rules.training_limits import TrainingLimits
from .steps.coordinator_steps import CoordinatorSteps
from .steps.requests import MOST_TOGETHER, FindVersion, Generate, Steps, Sync, run_steps

T = TypeVar("T")


class Coordinator:
    """Gets rollouts from a fleet for the training steps of one run.

    >>> with Publisher(url) as publisher, Coordinator(url, epoch=publisher.epoch) as fleet:
    ...     publisher.publish(model.state_dict(), step=0)
    ...     for step in range(1, steps + 1):
    ...         fleet.open_round(tasks_of(step), for_step=step, sampling=Sampling(samples=8, max_tokens=256))
    ...         batch = fleet.collect(step)
    ...         train(model, batch.rollouts)
    ...         fleet.published(publisher.publish(model.state_dict(), step=step))

    With a staleness budget of S steps, rounds for up to S steps ahead may be open besides the one that is collected: open them before
    collecting, and members work while the trainer trains. `epoch` is the publisher's: a trainer that takes the run over fences this one
    off, and every method then raises `Fenced`. After a restart call `resume` first: what was acknowledged and never trained is used again.

    Where the publisher signs, pass its `signing_key` and `trusted_keys`, so that boards, rounds and batches are signed, too: members that
    trust a key ignore all others. `SignatureInvalid` if the chain is signed and there is no key. `run` is the run's name (the publisher's
    `run`); by default it is the last part of the URL.

    `training` says what the trainer's model can be trained on; results beyond that are refused. What fails in training all the same is
    left out of an acknowledged batch with `reject`, and training goes on with the rest.

    The run must exist; its first version may be published later, but before anything else is asked. With `background` the fleet is looked
    after while the trainer trains. May be used from several threads, one at a time; `members` and `rejected` at any time.
    """

    def __init__(
        self,
        url: str | Path | Store,
        *,
        epoch: int,
        run: str | None = None,
        chain: ChainLog | None = None,
        signing_key: SigningKey | None = None,
        trusted_keys: Collection[str] = (),
        budget: StalenessBudget | None = None,
        scheduler: Scheduler | None = None,
        options: FleetOptions | None = None,
        training: TrainingLimits | None = None,
        background: bool = True,
        on_event: OnEvent | None = None,
        store_options: StoreOptions | None = None,
    ) -> None:
        self._store = open_store(url, options=store_options, on_event=on_event)
        self._owns_store = self._store is not url
        self._keyring = FleetKeyring(signing_key, trusted_keys)
        self._log = chain or ChainLog(self._store, run=run, trusted_keys=self._keyring.trusted)
        self._chain = ChainVersions(self._log)
        self._epoch = epoch
        self._budget = budget or StalenessBudget()
        self._scheduler = scheduler
        self._options = options or FleetOptions()
        self._training = training
        self._on_event = on_event
        self._steps: CoordinatorSteps | None = None
        self._members: list[MemberStatus] = []
        self._turn = threading.RLock()
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(MOST_TOGETHER, thread_name_prefix="deltawire-fleet")
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._look_after, name="deltawire-fleet-poll", daemon=True)
            self._thread.start()

    @property
    def budget(self) -> StalenessBudget:
        """How old what is trained on may be."""
        return self._budget

    @property
    def rejected(self) -> Counter[Reason]:
        """Results that were refused so far, by reason."""
        return Counter() if self._steps is None else Counter(self._steps.rejected)

    def members(self) -> list[MemberStatus]:
        """Everybody who is or was in the fleet, as of the last poll."""
        return self._members

    def resume(self) -> list[Round]:
        """Take up what earlier trainers left for the steps after the version in force; the rounds that are open now, by rising step."""
        return self._run(lambda steps: steps.resume())

    def open_round(self, rows: Sequence[Sequence[Row]], *, for_step: int, sampling: Sampling) -> Round:
        """Offer work for a training step: one task for each sequence of rows of a dataset. See `CoordinatorSteps.open_round`.

        Gives the round that is open for that step already, if there is one, with the rows that it has: look at `Batch.rows`.
        """
        return self._run(lambda steps: steps.open_round(rows, for_step=for_step, sampling=sampling))

    def published(self, version: Version) -> None:
        """A new policy is out. Tell it of every version: budget and rounds go by the newest."""
        if version.step is None:
            raise ValueError("a fleet goes by training steps: publish with step=…")
        with self._turn:
            if self._steps is not None:
                self._steps.published(KnownVersion(version.seq, version.step, version.digest))

    def collect(self, for_step: int, *, timeout: float | None = None, stop: Callable[[], bool] | None = None) -> Batch:
        """Wait until the round for this step is settled and acknowledge it. Losses of the store are waited out.

        `FleetTimeout` after `timeout` seconds, or when `stop` says so: call it again to wait on. `FleetDeserted` if members leave because
        of errors and nobody comes back for `FleetOptions.patience_seconds`: call it again to wait as long again. `Fenced`.
        """
        return self._run(lambda steps: steps.collect(for_step, timeout=timeout, stop=stop))

    def reject(self, batch: Batch, results: Collection[int], why: str) -> Batch:
        """Leave results out of an acknowledged batch, given by their indices, before its step is trained. Returns the batch without them.

        Call it when training on them fails. The rejection is in the store before this returns, so no trainer that takes over will use
        them. A step whose batch is empty is published unchanged. Losses of the store are waited out. `Fenced`.
        """
        return self._run(lambda steps: steps.reject(batch, results, why))

    def poll(self) -> None:
        """Look once at the fleet: for who has no background and trains for long."""
        self._run(lambda steps: steps.poll())

    def stop(self) -> None:
        """Tell all members to leave."""
        self._run(lambda steps: steps.stop())

    def close(self) -> None:
        """Let go of threads and connections. The fleet is not told to leave: another trainer may take it over. May be called twice.

        A call that waits on another thread ends with `FleetTimeout`, and so does every later one.
        """
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        with self._turn:
            self._pool.shutdown()
            if self._owns_store:
                self._store.close()
                self._owns_store = False

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, begin: Callable[[CoordinatorSteps], Steps[T]]) -> T:
        with self._turn:
            if self._closing.is_set():
                raise FleetTimeout("the coordinator was closed.")
            steps = self._opened()
            try:
                return run_steps(begin(steps), self._store, sleep=self._sleep, perform=self._perform, pool=self._pool)
            finally:
                self._members = steps.members()

    def _opened(self) -> CoordinatorSteps:
        if self._steps is None:
            head = self._log.head()
            if head is not None and head.signature is not None and not self._keyring.signs:
                raise SignatureInvalid(
                    "the chain is signed, so the fleet's records must be, too: pass the publisher's signing_key to the coordinator."
                )
            self._steps = CoordinatorSteps(
                run=self._log.run.id,
                epoch=self._epoch,
                newest=self._chain.newest(),
                draw_nonce=lambda: secrets.token_hex(16),
                clock=lambda: int(time.time() * 1000),
                ticks=time.monotonic,
                budget=self._budget,
                scheduler=self._scheduler,
                options=self._options,
                training=self._training,
                keyring=self._keyring,
                on_event=self._on_event,
            )
        return self._steps

    def _perform(self, request: FindVersion | Sync | Generate) -> Any:
        if not isinstance(request, FindVersion):
            raise TypeError(f"a trainer cannot {type(request).__name__}")
        return self._chain.find(request.seq)

    def _sleep(self, seconds: float) -> None:
        if self._steps is not None:
            self._members = self._steps.members()
        if self._closing.wait(seconds):
            raise FleetTimeout("the coordinator was closed.")

    def _look_after(self) -> None:
        """Poll while nobody else does and there is work out. What goes wrong is told, and met again by the next call that matters."""
        while not self._closing.wait(self._options.poll_seconds):
            if not self._turn.acquire(timeout=self._options.poll_seconds):
                continue  # who has it polls, or closes from within a signal handler and waits for this thread
            try:
                if self._steps is not None and self._steps.rounds:
                    self._run(lambda steps: steps.poll())
            except DeltawireError as error:
                emit(self._on_event, "fleet-retrying", error=str(error))
                if not isinstance(error, StoreError):
                    return
            finally:
                self._turn.release()
