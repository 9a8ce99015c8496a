"""Live traffic of a run: what users were answered, and what they said about it."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..chain.log import ChainLog
from ..events import OnEvent
from ..fleet.fleet_keyring import FleetKeyring
from ..fleet.steps.requests import MOST_TOGETHER, Steps, run_steps
from ..format.records.live_records import Metric, Metrics
from ..store import Store, StoreOptions, open_store
from .rules.join import Joined
from .steps.joiner_steps import JoinerOptions, JoinerSteps, Judge
from .steps.metric_steps import declare_metrics


class LiveTraffic:
    """The answers that gateways recorded, joined with the feedback that they received.

    >>> traffic = LiveTraffic("s3://bucket/run", metrics=[Metric("thumbs", window=3600, default=0.0)])
    >>> with GrpoTrainer(model, [], "s3://bucket/run", live=traffic, live_share=1.0) as trainer:
    ...     trainer.train(until=1000)

    A trainer that is given such an object makes rounds of the interactions that have their rewards. On its own, `ripe` shows them.
    Only interactions of users who agreed to training are read into memory.

    Parameters
    ----------
    url
        The location of the run: a URL, a directory, or an open store, which stays the caller's to close. None: that of the trainer.
    metrics
        The metrics of the run. A trainer declares them if the declaration in force differs. None takes the declaration in force.
    judge
        Called with a conversation that ends with an answer (`ConversationText`) and the user's next message. It returns the value of the
        metric `options.judge_metric`, or None. Gateways must record texts for it. Feedback for the same metric comes first.
    options
        Retention, limits, and the judge's metric.
    run
        The name of the run that must be at `url`.
    trusted_keys
        The public keys of which one must have signed declarations of metrics.
    on_event
        Called with every event.
    store_options
        How to open the store at `url`.
    """

    def __init__(
        self,
        url: str | Path | Store | None = None,
        *,
        metrics: Sequence[Metric] | None = None,
        judge: Judge | None = None,
        options: JoinerOptions | None = None,
        run: str | None = None,
        trusted_keys: Collection[str] = (),
        on_event: OnEvent | None = None,
        store_options: StoreOptions | None = None,
    ) -> None:
        self._url = url
        self._metrics = None if metrics is None else tuple(metrics)
        self._judge = judge
        self._options = options or JoinerOptions()
        self._run = run
        self._keyring = FleetKeyring(trusted_keys=trusted_keys)
        self._on_event = on_event
        self._store_options = store_options
        self._joiner: JoinerSteps | None = None

    def declare(self) -> None:
        """Declare `metrics` without a trainer, so that gateways and gates know them.

        They replace the declaration in force as a whole. On a signed chain only a trainer can declare metrics.
        """
        if self._metrics is None:
            raise ValueError("pass the metrics to LiveTraffic")
        with self._requests() as (store, pool):
            run = ChainLog(store, run=self._run, trusted_keys=self._keyring.trusted).run.id
            run_steps(self._declare(run, self._keyring, self._on_event), store, sleep=time.sleep, pool=pool)

    def ripe(self) -> list[Joined]:
        """Look once at the store, and return the interactions that have their rewards, in the order in which they were stored.

        Interactions that a trainer has used already are among them as long as their files are in the store. Nothing is written: `metrics`
        count for this look; `declare` or a trainer declares them. Raises `NoMetrics` if none are given and none are declared.
        """
        with self._requests() as (store, pool):
            if self._joiner is None:
                run = ChainLog(store, run=self._run, trusted_keys=self._keyring.trusted).run.id
                metrics = self._metrics
                if metrics is None:
                    metrics = run_steps(self._declare(run, self._keyring, self._on_event), store, sleep=time.sleep, pool=pool).metrics
                self._joiner = self._joining(run, metrics, time.monotonic, self._on_event)
            run_steps(self._joiner.look(), store, sleep=time.sleep, pool=pool)
        return self._joiner.ripe()

    @property
    def counts(self) -> Counter[str]:
        """How many interactions were read, joined or left out, and why."""
        return Counter() if self._joiner is None else self._joiner.counts + self._joiner.table.counts

    def open(self, run: str, keyring: FleetKeyring, *, ticks: Callable[[], float], on_event: OnEvent | None) -> Steps[JoinerSteps]:
        """Declare the metrics, and return what joins interactions and feedback. Raises `NoMetrics` if none are declared.

        Parameters
        ----------
        run
            The run's id.
        keyring
            Signs the declaration of metrics, and checks the signatures of others.
        ticks
            Returns seconds that never run backwards.
        on_event
            Called with every event.
        """
        found = yield from self._declare(run, keyring, on_event)
        self._joiner = self._joining(run, found.metrics, ticks, on_event)
        return self._joiner

    @contextlib.contextmanager
    def _requests(self) -> Iterator[tuple[Store, ThreadPoolExecutor]]:
        if self._url is None:
            raise ValueError("pass the url of the run to LiveTraffic")
        store = open_store(self._url, options=self._store_options, on_event=self._on_event)
        try:
            with ThreadPoolExecutor(MOST_TOGETHER) as pool:
                yield store, pool
        finally:
            if store is not self._url:
                store.close()

    def _declare(self, run: str, keyring: FleetKeyring, on_event: OnEvent | None) -> Steps[Metrics]:
        nonce, clock = lambda: secrets.token_hex(16), lambda: int(time.time() * 1000)
        return declare_metrics(run, self._metrics, keyring, nonce, clock, on_event=on_event)

    def _joining(self, run: str, metrics: tuple[Metric, ...], ticks: Callable[[], float], on_event: OnEvent | None) -> JoinerSteps:
        return JoinerSteps(run, metrics, self._options, ticks, judge=self._judge, on_event=on_event)
