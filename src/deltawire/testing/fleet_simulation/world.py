"""One run of a fleet in virtual time: a remote store, a chain, trainers and members that run the real steps, and their faults."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from ...errors import DeltawireError, Fenced
from ...fleet.steps.claim_steps import claim_steps
from ...fleet.steps.member_state import MemberState, heartbeat_steps, leave_steps
from ...fleet.steps.requests import FindVersion, Generate, Sync, Wait
from ...fleet.steps.work_steps import upload_steps, work_steps
from ...store import fleet_keys
from ...store.requests import Put, Sleep
from .chain_model import ChainModel
from .engine_model import EngineModel
from .kernel import Kernel, Process, VirtualThread
from .misbehaviour import Misbehaviour
from .oracle import History, Oracle, Violation
from .region_model import Region
from .store_model import Network, StoreModel
from .trainer_model import ExternalAction, Plan, TrainerModel


@dataclass(slots=True)
class Member:
    """A member and its machine, which stays when the process dies.

    Parameters
    ----------
    name
        The member's name.
    engine
        Its engine.
    clock_offset
        By how many seconds its clock is wrong.
    tasks_at_a_time
        How many tasks it works on at the same time.
    misbehaviour
        How it breaks the rules; None for an honest member.
    process
        The process that runs now.
    state
        The state of the real steps.
    retired
        Whether the machine never comes back.
    running
        How many of its threads still work.
    region
        The region that it lives in; None for the origin's own.
    """

    name: str
    engine: EngineModel
    clock_offset: float
    tasks_at_a_time: int
    misbehaviour: Misbehaviour | None = None
    process: Process | None = None
    state: MemberState | None = None
    retired: bool = False
    running: int = 0
    region: Region | None = None

    @property
    def honest(self) -> bool:
        return self.misbehaviour is None


@dataclass(slots=True)
class Trainer:
    """A trainer process. The one that was started last is meant to run."""

    process: Process
    model: TrainerModel
    ended: bool = False


@dataclass(slots=True)
class World:
    """All parts of a simulation. The plan, the network and the random numbers determine everything that happens.

    Parameters
    ----------
    random
        The source of all random numbers.
    plan
        What the run is to do.
    network
        How fast and how reliable the network is.
    granularity
        The store shows times in multiples of this many seconds.
    member_poll
        Seconds between two looks of a member at the board.
    kernel
        Virtual time.
    members
        The members by name.
    trainers
        The trainers in the order of their start.
    checkpoints
        The saved checkpoints by step.
    is_trained
        Whether the last training step is published.
    finished
        Whether the run has reached its end.
    faults_over
        Whether no more faults happen.
    trace
        Called with one line for every event.
    watch
        Called with every request of every process, when it is made.
    regions
        The regions that members live in; empty if all of them are at the origin.
    published
        When each version was published, by the number of its commit.
    is_calm
        Whether nothing fails except links and relays, so that no other fault explains a step that takes long.
    """

    random: Random
    plan: Plan
    network: Network
    granularity: float = 0.0
    member_poll: float = 1.0
    kernel: Kernel = field(default_factory=Kernel)
    members: dict[str, Member] = field(default_factory=dict)
    trainers: list[Trainer] = field(default_factory=list)
    checkpoints: dict[int, History] = field(default_factory=dict)
    is_trained: bool = False
    finished: bool = False
    faults_over: bool = False
    trace: Callable[[str], None] | None = None
    watch: Callable[[VirtualThread, Any], None] | None = None
    regions: list[Region] = field(default_factory=list)
    published: dict[int, float] = field(default_factory=dict)
    is_calm: bool = False
    chain: ChainModel = field(init=False)
    store: StoreModel = field(init=False)
    oracle: Oracle = field(init=False)
    _deaths_due: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chain = ChainModel(self.random)
        self.chain.appended = lambda version: self.published.__setitem__(version.seq, self.kernel.now)
        self.store = StoreModel(self.kernel, self.random, self.network, granularity=self.granularity)
        self.oracle = Oracle(self.plan.run, self.chain, self.store.objects, self.plan.budget)
        if self.trace is not None:
            self.store.trace = self.log

    def log(self, process: str, text: str) -> None:
        """Write a line of the trace."""
        if self.trace is not None:
            self.trace(f"{self.kernel.now:10.3f}  {process:<12} {text}")

    # Trainers

    def start_trainer(self) -> None:
        """Start a trainer. It resumes from the newest checkpoint, or from an earlier one that the fleet must still support.

        Acknowledged results are kept for `keep_steps` steps below the newest version whose publication its trainer knows, and the judge
        demands them. No trainer is resumed from further back. Versions that a replaced trainer publishes get no checkpoint, and it deletes
        nothing for them. So the newest checkpoint is near enough, even if it is more than `keep_steps` below the chain's newest version.
        """
        oldest = self.chain.highest_step - self.plan.options.keep_steps
        steps = sorted(step for step in self.checkpoints if step >= oldest)
        resume_step = max(self.checkpoints, default=0)
        if steps and not self.faults_over and self.random.random() >= 0.6:
            resume_step = self.random.choice(steps)
        process = Process(f"trainer{len(self.trainers)}", self.kernel, self.perform)
        model = self.make_trainer(process)
        trainer = Trainer(process, model)
        self.trainers.append(trainer)
        self.log(process.name, f"starts from step {resume_step}")
        process.start(model.program(resume_step), lambda value, error: self._trainer_ended(trainer, error))

    def make_trainer(self, process: Process) -> TrainerModel:
        """Return a new trainer. Other kinds of runs have other trainers."""
        return TrainerModel(**self.trainer_parts(process))

    def trainer_parts(self, process: Process) -> dict[str, Any]:
        """Return the arguments of `TrainerModel`."""
        return {
            "plan": self.plan,
            "chain": self.chain,
            "objects": self.store.objects,
            "oracle": self.oracle,
            "checkpoints": self.checkpoints,
            "draw_nonce": self.draw_nonce,
            "clock": self.clock(self._offset()),
            "ticks": lambda: self.kernel.now,
            "spawn": lambda steps: process.start(steps, partial(self._service_thread_ended, process.name)),
        }

    def supervise_trainer(self) -> None:
        """Start a trainer if the last one has ended."""
        if not self.is_trained and (not self.trainers or self.trainers[-1].ended or not self.trainers[-1].process.alive):
            self.start_trainer()

    def _trainer_ended(self, trainer: Trainer, error: Exception | None) -> None:
        trainer.ended = True
        self.log(trainer.process.name, f"ends: {error!r}" if error else "has finished")
        if error is None:
            self.trainer_finished()
        elif isinstance(error, Violation):
            raise error
        elif isinstance(error, Fenced):
            if trainer is self.trainers[-1] and self.chain.claimed == getattr(trainer.model.coordinator, "epoch", self.chain.claimed):
                raise Violation(f"{trainer.process.name} was fenced, but no other trainer has taken over: {error}")
            self.kernel.later(5.0, self.supervise_trainer)
        else:
            raise unexpected(trainer.process.name, error)

    def trainer_finished(self) -> None:
        """Note that the last step is published, which is the end of the run."""
        self.is_trained = self.finished = True

    def _service_thread_ended(self, name: str, value: Any, error: Exception | None) -> None:
        if isinstance(error, Violation):
            raise error
        if error is not None:
            raise unexpected(name, error)

    def kill_trainer(self, restart_after: float) -> None:
        """Kill the last trainer, and start another one after a while."""
        if self.trainers:
            self.log(self.trainers[-1].process.name, "is killed")
            self.trainers[-1].process.kill()
            self.kernel.later(restart_after, self.supervise_trainer)

    def kill_after(self, process: Process, requests: int) -> None:
        """Kill a process right after it has sent this many further requests."""
        self._deaths_due[process.name] = requests

    # Members

    def add_member(self, member: Member) -> None:
        """Add a machine, and start its member."""
        self.members[member.name] = member
        if member.region is not None:
            self.store.links[member.name] = member.region.link
        self.start_member(member)

    def start_member(self, member: Member) -> None:
        """Start the member's process, unless it runs or is retired."""
        if member.retired or self.finished or (member.process is not None and member.process.alive and member.running):
            return
        member.engine.restart()
        process = member.process = Process(member.name, self.kernel, self.perform)
        state = member.state = MemberState(
            self.plan.run,
            member.name,
            self.draw_nonce(),
            self.draw_nonce,
            self.clock(member.clock_offset),
            self.random.random,
            lambda: self.kernel.now,
            poll_seconds=self.member_poll,
            tasks_at_a_time=member.tasks_at_a_time,
        )
        self.log(member.name, "starts")
        threads = [claim_steps(state), upload_steps(state), *(work_steps(state) for _ in range(member.tasks_at_a_time))]
        member.running = len(threads)
        for steps in threads:
            process.start(steps, lambda value, error: self._thread_ended(member, process, error))
        process.start(heartbeat_steps(state), lambda value, error: self._heartbeat_ended(member, error))
        if member.region is not None:
            member.region.join(process, member.engine, state)

    def kill_member(self, member: Member, restart_after: float | None) -> None:
        """Kill a member, and start it again after this many seconds; None if the machine does not come back."""
        self.log(member.name, "is killed")
        if member.process is not None:
            member.process.kill()
        member.retired = restart_after is None
        if restart_after is not None:
            self.kernel.later(restart_after, self.start_member, member)

    def _thread_ended(self, member: Member, process: Process, error: Exception | None) -> None:
        if error is not None and not isinstance(error, DeltawireError):
            raise unexpected(member.name, error)
        assert member.state is not None
        member.state.leave()  # as in the real process, the end of one thread ends all
        member.running -= 1
        if member.running == 0:
            self.log(member.name, "leaves")
            process.start(leave_steps(member.state), lambda value, error: self._left(member, error))

    def _left(self, member: Member, error: Exception | None) -> None:
        if error is not None:
            raise unexpected(member.name, error)
        assert member.process is not None
        member.process.kill()
        if not self.finished and not member.retired:
            self.kernel.later(10.0, self.start_member, member)

    def _heartbeat_ended(self, member: Member, error: Exception | None) -> None:
        if error is not None:
            raise unexpected(member.name, error)

    # Requests of processes

    def perform(self, thread: VirtualThread, request: Any) -> None:
        """Answer a request of any process after some time."""
        process = thread.process
        if self.watch is not None:
            self.watch(thread, request)
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
            case Sync():
                self.members[process.name].engine.sync(thread, request)
            case Generate():
                member = self.members[process.name]
                self._judge_begin(member, request)
                if member.misbehaviour is None or member.misbehaviour.kind != "hog":
                    member.engine.generate(thread, request)
            case _:
                self._send(thread, request)
        if process.name in self._deaths_due:
            self._deaths_due[process.name] -= 1
            if self._deaths_due[process.name] < 0:
                del self._deaths_due[process.name]
                # A generator cannot close itself while it runs.
                self.kernel.later(0.0, self._die, process)

    def _send(self, thread: VirtualThread, request: Any) -> None:
        member = self.members.get(thread.process.name)
        if member is not None and member.honest and isinstance(request, Put) and request.key.startswith(fleet_keys.MEMBERS):
            self._judge_heartbeat(member)
        if member is None or member.misbehaviour is None:
            self.store.submit(thread, request)
            return
        first, *others = member.misbehaviour.sends(request)
        self.store.submit(thread, first)
        for other in others:
            self.store.submit(_IgnoresAnswers(thread.process), other)

    def _judge_begin(self, member: Member, request: Generate) -> None:
        """Check that an honest member begins a task only with a version that may do it."""
        policy = None if member.state is None else member.state.policy
        if member.honest and (policy is None or not request.round.oldest_step <= policy.step < request.round.for_step):
            raise Violation(f"{member.name} begins a task of round {request.round.round} with a version that may not do it.")

    def _judge_heartbeat(self, member: Member) -> None:
        """Check that an honest member names only tasks that it holds: queued, begun, made, or about to be leased."""
        state = member.state
        assert state is not None
        known = {claim.attempt for claim in state.queue} | {made.attempt for made in state.made}
        if len(state.working - known) > len(state.begun) + 1:
            raise Violation(f"{member.name} names tasks in its heartbeat that it no longer holds.")

    def _die(self, process: Process) -> None:
        if process.name in self.members:
            self.kill_member(self.members[process.name], 5.0)
        elif process is self.trainers[-1].process:
            self.kill_trainer(5.0)
        else:
            process.kill()

    def _do(self, thread: VirtualThread, request: ExternalAction) -> None:
        """Do an external action, even if its process has died. The answer takes as long as the request."""
        try:
            answer = request.action()
        except Fenced as error:
            self.kernel.later(request.seconds, thread.fail, error)
        else:
            self.kernel.later(request.seconds, thread.resume, answer)

    # Sources of random numbers and time

    def draw_nonce(self) -> str:
        """Return 32 random hexadecimal digits."""
        return f"{self.random.getrandbits(128):032x}"

    def clock(self, offset: float) -> Callable[[], int]:
        """Return the clock of a machine, in milliseconds. It is wrong by `offset` seconds."""
        return lambda: int((self.kernel.now + offset + 1_600_000_000) * 1000)

    def _offset(self) -> float:
        return self.random.choice([0.0, 3600.0, -3600.0, 7.5e7])


class ResumeOnce:
    """Resumes a thread when it is first called, and does nothing after that."""

    def __init__(self, kernel: Kernel, thread: VirtualThread) -> None:
        self._kernel = kernel
        self._thread: VirtualThread | None = thread

    def __call__(self) -> None:
        if self._thread is not None:
            self._kernel.later(0.0, self._thread.resume, None)
            self._thread = None


class _IgnoresAnswers:
    """Takes the place of a sender, and waits for no answers."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def resume(self, value: Any) -> None:
        """Ignore the answer."""

    def fail(self, error: Exception) -> None:
        """Ignore the answer."""


def unexpected(process: str, error: Exception) -> Violation:
    """Return the violation for an error that no process may die of."""
    return Violation(f"{process} died of an unexpected error:\n{''.join(traceback.format_exception(error))}")
