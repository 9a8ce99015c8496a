"""The trainer's side of a fleet: it runs `CoordinatorSteps` over a real store."""

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
from .chain_versions import ChainVersions
from .fleet_keyring import FleetKeyring
from .options import FleetOptions
from .rules.admission import Reason
from .rules.roster import MemberStatus
from .rules.scheduler import Scheduler
from .rules.staleness import KnownVersion, StalenessBudget
from .rules.training_limits import TrainingLimits
from .steps.batch_steps import Batch
from .steps.coordinator_steps import CoordinatorSteps
from .steps.requests import MOST_TOGETHER, FindVersion, Generate, Steps, Sync, run_steps
from .steps.trainer_context import TrainerContext

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

    With a staleness budget of S steps, rounds for up to S later steps may be open at the same time. Open them before you collect, so that
    members work while the trainer trains. After a restart call `resume` first: it uses results again that were acknowledged and never
    trained. The run must exist. Publish its first version before you call any method.

    If another trainer takes over the run, every method raises `Fenced`. The methods may be called from several threads, one at a time;
    `members` and `rejected` at any time.

    Parameters
    ----------
    url
        Where the run is: a URL, a directory, or an open store. An open store stays the caller's to close.
    epoch
        The publisher's epoch (`publisher.epoch`).
    run
        The run's name, as given to the publisher. By default it is the last part of the URL.
    chain
        The chain, if the caller has opened it already.
    signing_key
        The publisher's `signing_key`, if it has one: boards, rounds and batches are then signed, and members that trust a key ignore all
        others. If the chain is signed and the key is missing, the methods raise `SignatureInvalid`.
    trusted_keys
        The publisher's `trusted_keys`.
    budget
        How old the policy may be that made a token.
    scheduler
        Decides how many tasks each member is offered.
    options
        How the fleet is run: leases, quorum, polling.
    training
        What the trainer's model can be trained on. Results beyond these limits are refused. If training on an accepted result still fails,
        leave it out of its batch with `reject`.
    background
        Whether a thread polls the fleet while the trainer trains.
    meanwhile
        Called by that thread after each poll, so that a trainer can call `published` and `open_round` while it trains. It must not raise.
    ask_newest
        Returns the newest published version, or None if it is not known. It is called at any time and on any thread, and must not raise. A
        trainer that publishes in the background passes it, so that members get work for a version without waiting for `published`.
    on_event
        Called with every event.
    store_options
        How to open the store at `url`.
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
        meanwhile: Callable[[], None] | None = None,
        ask_newest: Callable[[], Version | None] = lambda: None,
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
        self._training = training or TrainingLimits()
        self._meanwhile = meanwhile
        self._ask_newest = ask_newest
        self._on_event = on_event
        self._steps: CoordinatorSteps | None = None
        self._members: list[MemberStatus] = []
        self._turn = threading.RLock()
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(MOST_TOGETHER, thread_name_prefix="deltawire-fleet")
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._poll_in_background, name="deltawire-fleet-poll", daemon=True)
            self._thread.start()

    @property
    def budget(self) -> StalenessBudget:
        """How old the policy may be that made a token."""
        return self._budget

    @property
    def rejected(self) -> Counter[Reason]:
        """The number of results that were refused so far, by reason."""
        return Counter() if self._steps is None else Counter(self._steps.rejected)

    def members(self) -> list[MemberStatus]:
        """Return the members that have a heartbeat in the store, as of the last poll."""
        return self._members

    def resume(self) -> list[Round]:
        """Adopt the rounds that earlier trainers opened for the steps after the version in force.

        Returns the rounds that are open now, by rising step. Results that an earlier trainer acknowledged are used again.
        """
        return self._run(lambda steps: steps.resume())

    def open_round(self, rows: Sequence[Sequence[Row]], *, for_step: int, sampling: Sampling) -> Round:
        """Offer work for a training step, and return the round.

        If a round is already open for that step, it is returned with the rows that it has: look at `Batch.rows`.

        Parameters
        ----------
        rows
            The rows of a dataset: one task for each sequence of rows.
        for_step
            The training step. It must come after the newest published step, and within the staleness budget (ValueError).
        sampling
            How completions are drawn.
        """
        return self._run(lambda steps: steps.open_round(rows, for_step=for_step, sampling=sampling))

    def published(self, version: Version) -> None:
        """Note that the trainer has published a version. Call it after every version: the budget and the rounds depend on the newest.

        Parameters
        ----------
        version
            The version that the publisher returned.
        """
        known = _known(version)
        with self._turn:
            if self._steps is not None:
                self._steps.published(known)

    def collect(self, for_step: int, *, timeout: float | None = None, stop: Callable[[], bool] | None = None) -> Batch:
        """Wait until the round for this step is settled, acknowledge it, and return its results. Waits while the store is unavailable.

        Raises `FleetDeserted` if members leave because of errors and none comes back for `FleetOptions.patience_seconds`. Call it again to
        wait as long again.

        Parameters
        ----------
        for_step
            The training step.
        timeout
            Seconds after which to raise `FleetTimeout`. Call it again to continue waiting. None waits for ever.
        stop
            Called while waiting. When it returns true, `FleetTimeout` is raised.
        """
        return self._run(lambda steps: steps.collect(for_step, timeout=timeout, stop=stop))

    def reject(self, batch: Batch, results: Collection[int], why: str) -> Batch:
        """Leave results out of an acknowledged batch before its step is trained. Return the batch without them.

        Call it when training on them fails. The rejection is in the store before this returns, so no trainer that takes over uses these
        results. If nothing is left in the batch, publish the step with unchanged weights. Waits while the store is unavailable.

        Parameters
        ----------
        batch
            The batch that `collect` returned.
        results
            The indices of the results to leave out.
        why
            What went wrong, for people.
        """
        return self._run(lambda steps: steps.reject(batch, results, why))

    def exclude(self, member: str, why: str) -> None:
        """Offer a member nothing from now on, and refuse its results. It lasts until this coordinator is closed.

        Parameters
        ----------
        member
            The member's name.
        why
            The reason, for people.
        """
        with self._turn:
            self._opened().exclude(member, why)

    def is_open(self, for_step: int) -> bool:
        """Tell whether a round is open for a training step, or was acknowledged.

        Parameters
        ----------
        for_step
            The training step.
        """
        with self._turn:
            return for_step in self._opened().rounds

    def perform(self, begin: Callable[[CoordinatorSteps], Steps[T]]) -> T:
        """Run steps of the trainer in turn with those of the coordinator, and return their result.

        Parameters
        ----------
        begin
            Called with the coordinator's own steps. Returns the steps to run.
        """
        return self._run(begin)

    def poll(self) -> None:
        """Look at the fleet once. Call it now and then during a long training step if `background` is False."""
        self._run(lambda steps: steps.poll())

    def stop(self) -> None:
        """Tell all members to leave."""
        self._run(lambda steps: steps.stop())

    def close(self) -> None:
        """Stop the threads and close the connections. May be called twice.

        Members are not told to leave, because another trainer may take over the fleet. A call that waits on another thread ends with
        `FleetTimeout`, and so does every later call.
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
                    "the chain is signed, so the fleet's records must be signed too: pass the publisher's signing_key to the coordinator."
                )
            trainer = TrainerContext(
                run=self._log.run.id,
                epoch=self._epoch,
                draw_nonce=lambda: secrets.token_hex(16),
                clock=lambda: int(time.time() * 1000),
                budget=self._budget,
                options=self._options,
                training=self._training,
                keyring=self._keyring,
                on_event=self._on_event,
            )
            self._steps = CoordinatorSteps(
                trainer, newest=self._chain.newest(), ticks=time.monotonic, scheduler=self._scheduler, ask_newest=self._newest
            )
        return self._steps

    def _newest(self) -> KnownVersion | None:
        version = self._ask_newest()
        return None if version is None else _known(version)

    def _perform(self, request: FindVersion | Sync | Generate) -> Any:
        if not isinstance(request, FindVersion):
            raise TypeError(f"a trainer cannot {type(request).__name__}")
        return self._chain.find(request.seq)

    def _sleep(self, seconds: float) -> None:
        if self._steps is not None:
            self._members = self._steps.members()
        if self._closing.wait(seconds):
            raise FleetTimeout("the coordinator was closed.")

    def _poll_in_background(self) -> None:
        """Poll in the background while rounds are open. Errors become events; the next call of the trainer meets them again."""
        while not self._closing.wait(self._options.poll_seconds):
            if not self._turn.acquire(timeout=self._options.poll_seconds):
                continue  # the thread that has it polls, or closes in a signal handler and waits for this thread
            try:
                if self._steps is not None and self._steps.rounds:
                    self._run(lambda steps: steps.poll())
            except DeltawireError as error:
                emit(self._on_event, "fleet-retrying", error=str(error))
                if not isinstance(error, StoreError):
                    return
            finally:
                self._turn.release()
            if self._meanwhile is not None:
                self._meanwhile()


def _known(version: Version) -> KnownVersion:
    if version.step is None:
        raise ValueError("a fleet needs the training step of every version: publish with step=…")
    return KnownVersion(version.seq, version.step, version.digest)
