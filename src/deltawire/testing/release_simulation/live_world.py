"""All parts of one simulated run of live traffic, and the processes that are started, killed and started again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ...format.feedback import Feedback, FeedbackFile
from ...format.records.live_records import Metric
from ...live.gate_rules import GatePolicy
from ...store import live_keys
from ...store.live_keys import LiveKey
from ...store.requests import Put
from ..fleet_simulation.kernel import Process
from ..fleet_simulation.oracle import Oracle
from ..fleet_simulation.world import World
from .blocking import blocking_steps
from .gateway_model import GatewayModel
from .live_chain import LiveChain
from .live_oracle import LIVE, LiveOracle
from .live_trainer import LiveTrainerModel
from .operators import Follower, Promoter, watch_canary
from .users import Users
from .virtual_time import VirtualTime

UPLOAD_SECONDS = 60.0
"""Gateways have this long to upload an answer when nothing fails."""


@dataclass(slots=True)
class Service:
    """A process that is started again whenever it ends.

    Parameters
    ----------
    name
        The name of the process.
    start
        Starts its threads in a process.
    stopped
        Called when it is killed.
    process
        The process that runs now.
    """

    name: str
    start: Callable[[Process], None]
    stopped: Callable[[], None] = lambda: None
    process: Process | None = None


@dataclass(slots=True, kw_only=True)
class LiveWorld(World):
    """All parts of a run, in addition to those of every fleet. The settings and the random numbers determine everything that happens.

    Parameters
    ----------
    metrics
        The metrics of the run.
    retention
        Seconds after which trainers delete files of live traffic.
    live_tasks
        How many live tasks each step has.
    policy
        The proofs that a canary has to give.
    bad_versions
        The part of all versions that users dislike.
    folder
        The directory of journals.
    time
        The time that code without a clock of its own sees.
    """

    metrics: tuple[Metric, ...]
    retention: float
    live_tasks: int
    policy: GatePolicy
    bad_versions: float
    folder: Path
    time: VirtualTime
    gateways: list[GatewayModel] = field(default_factory=list)
    followers: list[Follower] = field(default_factory=list)
    services: dict[str, Service] = field(default_factory=dict)
    drawn: dict[str, Any] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    chain: LiveChain = field(init=False)
    live: LiveOracle = field(init=False)
    users: Users = field(init=False)
    _started: int = 0

    def __post_init__(self) -> None:
        World.__post_init__(self)
        self.chain = LiveChain(self.random, self.store.objects, self.plan.run)
        self.oracle = Oracle(self.plan.run, self.chain, self.store.objects, self.plan.budget, trainers_own=LIVE)
        self.live = LiveOracle(self.plan.run, self.chain, self.store.objects, self.oracle, self.metrics)
        self.chain.appended = lambda version: self._judge_version(str(version.digest))
        self.users = Users(self, self.random)
        self.time.kernel = self.kernel

    def is_bad(self, seq: int) -> bool:
        """Return whether users dislike a version."""
        known = self.chain.find(seq)
        return known is not None and str(known.digest) in self.live.bad

    def _judge_version(self, digest: str) -> None:
        """Decide whether users will like a new version. They like the first."""
        if self.live.counts["versions"] and self.random.random() < self.bad_versions:
            self.live.bad.add(digest)
        self.live.counts["versions"] += 1

    # Trainers

    def make_trainer(self, process: Process) -> LiveTrainerModel:
        return LiveTrainerModel(
            **self.trainer_parts(process), live=self.live, metrics=self.metrics, retention=self.retention, most=self.live_tasks
        )

    def trainer_finished(self) -> None:
        self.is_trained = True

    def _offset(self) -> float:
        return self.random.choice([0.0, 3600.0, -3600.0])

    # Other processes

    def add_gateway(self, flush: float, offset: float) -> None:
        """Add a gateway with a journal of its own."""
        name = f"gate{len(self.gateways)}way"
        folder = self.folder / name
        gateway = GatewayModel(
            name,
            folder,
            self.kernel,
            self.plan.run,
            self.drawn,
            lambda name: self.live.records(name, self.kernel.now),
            flush=flush,
            offset=offset,
            entered=self.time.enter,
        )
        self.gateways.append(gateway)

        def start(process: Process) -> None:
            gateway.start(process, f"{name}.{self.random.getrandbits(64):016x}", partial(self._service_thread_ended, name))

        self._serve(Service(name, start, gateway.kill))

    def add_follower(self, channel: str, fetch_seconds: float) -> None:
        """Add an engine that follows a channel."""
        follower = Follower(f"engine{len(self.followers)}", channel, self.live.serves, fetch_seconds)
        self.followers.append(follower)
        self._serve(
            Service(
                follower.name,
                lambda process: self._start_blocking(process, lambda: follower.follow(lambda: self.kernel.now)),
                lambda: setattr(follower, "serving", None),
            )
        )

    def add_gate(self, offset: float) -> None:
        """Add a gate between canary and stable."""
        work = partial(watch_canary, self.policy, partial(self._seconds, offset), lambda: self.kernel.now)
        self._serve(Service(f"gate{len(self.services)}", lambda process: self._start_blocking(process, work)))

    def add_promoter(self, pause: float, offset: float) -> None:
        """Add somebody who promotes versions."""
        promoter = Promoter(self.random, self.chain, self.tried, pause, lambda: self.faults_over)
        work = partial(promoter.work, partial(self._seconds, offset), lambda: self.kernel.now)
        self._serve(Service(f"promoter{len(self.services)}", lambda process: self._start_blocking(process, work)))

    def _serve(self, service: Service) -> None:
        self.services[service.name] = service
        self.start_service(service)

    def start_service(self, service: Service) -> None:
        """Start a process again, unless it runs."""
        if not self.finished and (service.process is None or not service.process.alive):
            self._started += 1
            self.log(service.name, "starts")
            service.process = Process(service.name, self.kernel, self.perform)
            service.start(service.process)

    def kill_service(self, service: Service, restart_after: float) -> None:
        """Kill a process, and start it again after a while."""
        if service.process is not None and service.process.alive:
            self.log(service.name, "is killed")
            service.stopped()
            service.process.kill()
            self.kernel.later(restart_after, self.start_service, service)

    def _start_blocking(self, process: Process, work: Callable[[], None]) -> None:
        process.start(blocking_steps(work), partial(self._service_thread_ended, process.name))

    def stop(self) -> None:
        """End all processes, after the run."""
        self.finished = True
        for service in self.services.values():
            service.stopped()
            if service.process is not None:
                service.process.kill()
        for trainer in self.trainers:
            trainer.process.kill()

    def vandalise(self) -> None:
        """Write objects that are not what their keys say, or that belong to another run."""
        data = bytes(self.random.getrandbits(8) for _ in range(40))
        session = f"gate0way.{self.random.getrandbits(64):016x}"
        other = Feedback(self.users.new_id(4), "thumbs", True, inference=self.users.new_id(7))
        foreign = FeedbackFile("0" * 32, session, 0, (other,)).to_bytes()
        self.store.objects.perform(Put(live_keys.feedback_key(LiveKey(session, 0, "0" * 64)), data))
        self.store.objects.perform(Put(live_keys.interactions_key(LiveKey(session, 0, "1" * 64)), data))
        self.store.objects.perform(Put(live_keys.feedback_key(LiveKey(session, 1, "2" * 64)), foreign))

    def check_end(self) -> None:
        """Look from time to time whether the run has reached its end."""
        waiting = self.live.waiting_since()
        is_stored = waiting is None or waiting[1] > self.kernel.now - UPLOAD_SECONDS
        head = self.chain.head()
        is_tried = head is not None and str(head.digest) in self.tried
        is_settled = self.live.is_settled((one.channel, one.serving) for one in self.followers)
        if self.faults_over and self.is_trained and is_stored and is_tried and is_settled:
            self.finished = True
        else:
            self.kernel.later(10.0, self.check_end)

    def _die(self, process: Process) -> None:
        if process.name in self.services:
            self.kill_service(self.services[process.name], 5.0)
        else:
            World._die(self, process)

    def _seconds(self, offset: float) -> float:
        return 1_600_000_000 + self.kernel.now + offset
