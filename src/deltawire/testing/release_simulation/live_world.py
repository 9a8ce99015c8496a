"""All parts of one simulated run of live traffic, and the processes that are started, killed and started again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from ...errors import Fenced
from ...fleet.steps.requests import FindVersion, Wait
from ...format.feedback import Feedback, FeedbackFile
from ...format.records.live_records import Metric
from ...live.gate_rules import GatePolicy
from ...store import live_keys
from ...store.live_keys import LiveKey
from ...store.requests import Put, Sleep
from ..fleet_simulation.kernel import Kernel, Process, VirtualThread
from ..fleet_simulation.oracle import History, Oracle, Violation
from ..fleet_simulation.store_model import Network, StoreModel
from ..fleet_simulation.trainer_model import ExternalAction, Plan
from ..fleet_simulation.world import ResumeOnce, unexpected
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


@dataclass(slots=True)
class LiveTrainer:
    """A trainer process. The one that was started last is meant to run."""

    process: Process
    model: LiveTrainerModel
    ended: bool = False


@dataclass(slots=True)
class LiveWorld:
    """All parts of a run. The settings and the random numbers determine everything that happens.

    Parameters
    ----------
    random
        The source of all random numbers.
    plan
        What the trainers are to do.
    network
        How fast and how reliable the network is.
    granularity
        The store shows times in multiples of this many seconds.
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
    trace
        Called with one line for every event.
    """

    random: Random
    plan: Plan
    network: Network
    granularity: float
    metrics: tuple[Metric, ...]
    retention: float
    live_tasks: int
    policy: GatePolicy
    bad_versions: float
    folder: Path
    time: VirtualTime
    trace: Callable[[str], None] | None = None
    kernel: Kernel = field(default_factory=Kernel)
    gateways: list[GatewayModel] = field(default_factory=list)
    followers: list[Follower] = field(default_factory=list)
    services: dict[str, Service] = field(default_factory=dict)
    trainers: list[LiveTrainer] = field(default_factory=list)
    checkpoints: dict[int, History] = field(default_factory=dict)
    drawn: dict[str, Any] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    is_trained: bool = False
    finished: bool = False
    faults_over: bool = False
    chain: LiveChain = field(init=False)
    store: StoreModel = field(init=False)
    oracle: LiveOracle = field(init=False)
    users: Users = field(init=False)
    _deaths_due: dict[str, int] = field(default_factory=dict)
    _started: int = 0

    def __post_init__(self) -> None:
        self.store = StoreModel(self.kernel, self.random, self.network, granularity=self.granularity)
        self.chain = LiveChain(self.random, self.store.objects, self.plan.run)
        fleet = Oracle(self.plan.run, self.chain, self.store.objects, self.plan.budget, trainers_own=LIVE)
        self.oracle = LiveOracle(self.plan.run, self.chain, self.store.objects, fleet, self.metrics)
        self.chain.appended = lambda version: self._judge_version(str(version.digest))
        self.users = Users(self, self.random)
        self.time.kernel = self.kernel
        if self.trace is not None:
            self.store.trace = self.log

    def log(self, process: str, text: str) -> None:
        """Write a line of the trace."""
        if self.trace is not None:
            self.trace(f"{self.kernel.now:10.3f}  {process:<12} {text}")

    def is_bad(self, seq: int) -> bool:
        """Return whether users dislike a version."""
        known = self.chain.find(seq)
        return known is not None and str(known.digest) in self.oracle.bad

    def _judge_version(self, digest: str) -> None:
        """Decide whether users will like a new version. They like the first."""
        if self.oracle.counts["versions"] and self.random.random() < self.bad_versions:
            self.oracle.bad.add(digest)
        self.oracle.counts["versions"] += 1

    # Trainers

    def start_trainer(self) -> None:
        """Start a trainer. It resumes from the newest checkpoint, or from an earlier one that the fleet must still support."""
        oldest = self.chain.highest_step - self.plan.options.keep_steps
        steps = sorted(step for step in self.checkpoints if step >= oldest)
        resume_step = 0
        if steps:
            resume_step = steps[-1] if self.faults_over or self.random.random() < 0.6 else self.random.choice(steps)
        process = Process(f"trainer{len(self.trainers)}", self.kernel, self.perform)
        model = LiveTrainerModel(
            plan=self.plan,
            chain=self.chain,
            objects=self.store.objects,
            oracle=self.oracle.fleet,
            checkpoints=self.checkpoints,
            draw_nonce=lambda: f"{self.random.getrandbits(128):032x}",
            clock=partial(self._clock, self.random.choice([0.0, 3600.0, -3600.0])),
            ticks=lambda: self.kernel.now,
            spawn=lambda steps: process.start(steps, partial(self._thread_ended, process.name)),
            live=self.oracle,
            metrics=self.metrics,
            retention=self.retention,
            most=self.live_tasks,
        )
        trainer = LiveTrainer(process, model)
        self.trainers.append(trainer)
        self.log(process.name, f"starts from step {resume_step}")
        process.start(model.program(resume_step), lambda value, error: self._trainer_ended(trainer, error))

    def supervise_trainer(self) -> None:
        """Start a trainer if the last one has ended."""
        if not self.is_trained and (not self.trainers or self.trainers[-1].ended or not self.trainers[-1].process.alive):
            self.start_trainer()

    def kill_trainer(self, restart_after: float) -> None:
        """Kill the last trainer, and start another one after a while."""
        if self.trainers:
            self.log(self.trainers[-1].process.name, "is killed")
            self.trainers[-1].process.kill()
            self.kernel.later(restart_after, self.supervise_trainer)

    def _trainer_ended(self, trainer: LiveTrainer, error: Exception | None) -> None:
        trainer.ended = True
        self.log(trainer.process.name, f"ends: {error!r}" if error else "has finished")
        if error is None:
            self.is_trained = True
        elif isinstance(error, Violation):
            raise error
        elif isinstance(error, Fenced):
            self.kernel.later(5.0, self.supervise_trainer)
        else:
            raise unexpected(trainer.process.name, error)

    def _thread_ended(self, name: str, value: Any, error: Exception | None) -> None:
        if isinstance(error, Violation):
            raise error
        if error is not None:
            raise unexpected(name, error)

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
            lambda name: self.oracle.records(name, self.kernel.now),
            flush=flush,
            offset=offset,
            entered=self.time.enter,
        )
        self.gateways.append(gateway)

        def start(process: Process) -> None:
            gateway.start(process, f"{name}.{self.random.getrandbits(64):016x}", partial(self._thread_ended, name))

        self._serve(Service(name, start, gateway.kill))

    def add_follower(self, channel: str, fetch_seconds: float) -> None:
        """Add an engine that follows a channel."""
        follower = Follower(f"engine{len(self.followers)}", channel, self.oracle.serves, fetch_seconds)
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
        process.start(blocking_steps(work), partial(self._thread_ended, process.name))

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
        waiting = self.oracle.waiting_since()
        is_stored = waiting is None or waiting[1] > self.kernel.now - UPLOAD_SECONDS
        head = self.chain.head()
        is_tried = head is not None and str(head.digest) in self.tried
        is_settled = self.oracle.is_settled((one.channel, one.serving) for one in self.followers)
        if self.faults_over and self.is_trained and is_stored and is_tried and is_settled:
            self.finished = True
        else:
            self.kernel.later(10.0, self.check_end)

    # Requests of processes

    def perform(self, thread: VirtualThread, request: Any) -> None:
        """Answer a request of any process after some time."""
        match request:
            case Sleep(seconds):
                self.kernel.later(seconds, thread.resume, None)
            case Wait(signal, seen, seconds):
                answer = ResumeOnce(self.kernel, thread)
                signal.call_once(seen, answer)
                self.kernel.later(seconds, answer)
            case ExternalAction():
                self.kernel.later(request.seconds, self._do, thread, request)
            case FindVersion(seq):
                self.kernel.later(self.network.delay, lambda: thread.resume(self.chain.find(seq)))
            case _:
                self.store.submit(thread, request)
        name = thread.process.name
        if name in self._deaths_due:
            self._deaths_due[name] -= 1
            if self._deaths_due[name] < 0:
                del self._deaths_due[name]
                self.kernel.later(0.0, self._die, thread.process)  # a generator cannot close itself while it runs

    def kill_after(self, process: Process, requests: int) -> None:
        """Kill a process right after it has sent this many further requests."""
        self._deaths_due[process.name] = requests

    def _die(self, process: Process) -> None:
        if process.name in self.services:
            self.kill_service(self.services[process.name], 5.0)
        elif process is self.trainers[-1].process:
            self.kill_trainer(5.0)
        else:
            process.kill()

    def _do(self, thread: VirtualThread, request: ExternalAction) -> None:
        try:
            answer = request.action()
        except Fenced as error:
            self.kernel.later(request.seconds, thread.fail, error)
        else:
            self.kernel.later(request.seconds, thread.resume, answer)

    def _clock(self, offset: float) -> int:
        return int(self._seconds(offset) * 1000)

    def _seconds(self, offset: float) -> float:
        return 1_600_000_000 + self.kernel.now + offset
