"""One run of a fleet in virtual time: a store far away, a chain, trainers and members that run the real steps, and what befalls them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ...errors import DeltawireError, Fenced
from ...fleet.steps.member_steps import MemberState, heartbeat_steps, leave_steps, member_steps
from ...fleet.steps.requests import FindVersion, Generate, Sync
from ...store.requests import Sleep
from .chain_model import ChainModel
from .engine_model import EngineModel
from .kernel import Kernel, Process, Strand
from .mischief import Mischief
from .oracle import Line, Oracle, Violation
from .store_model import StoreModel, Weather
from .trainer_model import Do, Plan, TrainerModel


@dataclass(slots=True)
class Member:
    """A member and the machine that it runs on, which outlives its process."""

    name: str
    engine: EngineModel
    clock_offset: float
    strands: int
    mischief: Mischief | None = None
    process: Process | None = None
    state: MemberState | None = None
    retired: bool = False
    running: int = 0

    @property
    def honest(self) -> bool:
        return self.mischief is None


@dataclass(slots=True)
class Trainer:
    """A trainer process, in the order in which they were started. The last is the one that is meant to run."""

    process: Process
    model: TrainerModel
    ended: bool = False


@dataclass(slots=True)
class World:
    """Everything there is in a simulation. Nothing in it depends on anything but the plan, the weather and the random numbers."""

    random: Random
    plan: Plan
    weather: Weather
    granularity: float = 0.0
    member_poll: float = 1.0
    kernel: Kernel = field(default_factory=Kernel)
    members: dict[str, Member] = field(default_factory=dict)
    trainers: list[Trainer] = field(default_factory=list)
    checkpoints: dict[int, Line] = field(default_factory=dict)
    finished: bool = False
    calm: bool = False
    trace: Callable[[str], None] | None = None
    chain: ChainModel = field(init=False)
    store: StoreModel = field(init=False)
    oracle: Oracle = field(init=False)
    _dooms: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chain = ChainModel(self.random)
        self.store = StoreModel(self.kernel, self.random, self.weather, granularity=self.granularity)
        self.oracle = Oracle(self.plan.run, self.chain, self.store.objects, self.plan.budget)
        if self.trace is not None:
            self.store.trace = self.tell

    def tell(self, who: str, what: str) -> None:
        """A line of the trace."""
        if self.trace is not None:
            self.trace(f"{self.kernel.now:10.3f}  {who:<12} {what}")

    # Trainers

    def start_trainer(self) -> None:
        """Resume from the newest checkpoint, or one of those before it that the fleet still has to support."""
        oldest = self.chain.highest_step - self.plan.options.keep_steps
        steps = sorted(step for step in self.checkpoints if step >= oldest)
        resume_step = 0
        if steps:
            resume_step = steps[-1] if self.calm or self.random.random() < 0.6 else self.random.choice(steps)
        process = Process(f"trainer{len(self.trainers)}", self.kernel, self.perform)
        model = TrainerModel(
            plan=self.plan,
            chain=self.chain,
            objects=self.store.objects,
            oracle=self.oracle,
            checkpoints=self.checkpoints,
            draw_nonce=self.draw_nonce,
            clock=self.clock(self._offset()),
            ticks=lambda: self.kernel.now,
        )
        trainer = Trainer(process, model)
        self.trainers.append(trainer)
        self.tell(process.name, f"starts from step {resume_step}")
        process.start(model.program(resume_step), lambda value, error: self._trainer_ended(trainer, error))

    def supervise_trainer(self) -> None:
        """Start one if the last is gone."""
        if not self.finished and (not self.trainers or self.trainers[-1].ended or not self.trainers[-1].process.alive):
            self.start_trainer()

    def _trainer_ended(self, trainer: Trainer, error: Exception | None) -> None:
        trainer.ended = True
        self.tell(trainer.process.name, f"ends: {error!r}" if error else "has finished")
        if error is None:
            self.finished = True
        elif isinstance(error, Violation):
            raise error
        elif isinstance(error, Fenced):
            if trainer is self.trainers[-1] and self.chain.claimed == getattr(trainer.model.coordinator, "epoch", self.chain.claimed):
                raise Violation(f"{trainer.process.name} was fenced, and nobody has taken over: {error}")
            self.kernel.later(5.0, self.supervise_trainer)
        else:
            raise _unexpected(trainer.process.name, error)

    def kill_trainer(self, restart_after: float) -> None:
        """SIGKILL for the last one."""
        if self.trainers:
            self.tell(self.trainers[-1].process.name, "is killed")
            self.trainers[-1].process.kill()
            self.kernel.later(restart_after, self.supervise_trainer)

    def doom(self, process: Process, requests: int) -> None:
        """Have a process die right after it has sent so many further requests."""
        self._dooms[process.name] = requests

    # Members

    def add_member(self, member: Member) -> None:
        """A machine joins."""
        self.members[member.name] = member
        self.start_member(member)

    def start_member(self, member: Member) -> None:
        """Start its process, unless it runs or has been retired."""
        if member.retired or self.finished or (member.process is not None and member.process.alive and member.running):
            return
        member.engine.version = None
        process = member.process = Process(member.name, self.kernel, self.perform)
        state = member.state = MemberState(
            self.plan.run,
            member.name,
            self.draw_nonce(),
            self.draw_nonce,
            self.clock(member.clock_offset),
            self.random.random,
            poll_seconds=self.member_poll,
        )
        self.tell(member.name, "starts")
        member.running = member.strands
        for _ in range(member.strands):
            process.start(member_steps(state), lambda value, error: self._strand_ended(member, process, error))
        process.start(heartbeat_steps(state), lambda value, error: self._heart_stopped(member, error))

    def kill_member(self, member: Member, restart_after: float | None) -> None:
        """SIGKILL. None: the machine does not come back."""
        self.tell(member.name, "is killed")
        if member.process is not None:
            member.process.kill()
        member.retired = restart_after is None
        if restart_after is not None:
            self.kernel.later(restart_after, self.start_member, member)

    def _strand_ended(self, member: Member, process: Process, error: Exception | None) -> None:
        if error is not None and not isinstance(error, DeltawireError):
            raise _unexpected(member.name, error)
        assert member.state is not None
        member.state.leaving = True  # as the real process does: what ends one ends all
        member.running -= 1
        if member.running == 0:
            self.tell(member.name, "leaves")
            process.start(leave_steps(member.state), lambda value, error: self._left(member, error))

    def _left(self, member: Member, error: Exception | None) -> None:
        if error is not None:
            raise _unexpected(member.name, error)
        assert member.process is not None
        member.process.kill()
        if not self.finished and not member.retired:
            self.kernel.later(10.0, self.start_member, member)

    def _heart_stopped(self, member: Member, error: Exception | None) -> None:
        if error is not None:
            raise _unexpected(member.name, error)

    # What processes ask for

    def perform(self, strand: Strand, request: Any) -> None:
        """Answer a request of any process, in its own time."""
        process = strand.process
        match request:
            case Sleep(seconds):
                self.kernel.later(seconds, strand.resume, None)
            case Do():
                self.kernel.later(request.seconds, self._do, strand, request)
            case FindVersion(seq):
                self.kernel.later(self.weather.delay, lambda: strand.resume(self.chain.find(seq)))
            case Sync():
                self.members[process.name].engine.sync(strand, request)
            case Generate():
                member = self.members[process.name]
                if member.mischief is None or member.mischief.kind != "hog":
                    member.engine.generate(strand, request)
            case _:
                self._send(strand, request)
        if process.name in self._dooms:
            self._dooms[process.name] -= 1
            if self._dooms[process.name] < 0:
                del self._dooms[process.name]
                # Not from within its own generator.
                self.kernel.later(0.0, self._doomed, process)

    def _send(self, strand: Strand, request: Any) -> None:
        member = self.members.get(strand.process.name)
        if member is None or member.mischief is None:
            self.store.submit(strand, request)
            return
        first, *others = member.mischief.sends(request)
        self.store.submit(strand, first)
        for other in others:
            self.store.submit(_Unheard(strand.process), other)

    def _doomed(self, process: Process) -> None:
        if process.name in self.members:
            self.kill_member(self.members[process.name], 5.0)
        elif process is self.trainers[-1].process:
            self.kill_trainer(5.0)
        else:
            process.kill()

    def _do(self, strand: Strand, request: Do) -> None:
        """The deed is done even if the doer has died on the way; its answer takes as long again."""
        try:
            answer = request.action()
        except Fenced as error:
            self.kernel.later(request.seconds, strand.fail, error)
        else:
            self.kernel.later(request.seconds, strand.resume, answer)

    # Sources of what must not be drawn in secret

    def draw_nonce(self) -> str:
        return f"{self.random.getrandbits(128):032x}"

    def clock(self, offset: float) -> Callable[[], int]:
        """A machine's own clock in milliseconds: set by somebody, some time."""
        return lambda: int((self.kernel.now + offset + 1_600_000_000) * 1000)

    def _offset(self) -> float:
        return self.random.choice([0.0, 3600.0, -3600.0, 7.5e7])


class _Unheard:
    """Who sends this does not wait for an answer."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def resume(self, value: Any) -> None:
        """Nobody listens."""

    def fail(self, error: Exception) -> None:
        """Nobody listens."""


def _unexpected(who: str, error: Exception) -> Violation:
    return Violation(f"{who} died of an error that nobody foresaw:\n{''.join(traceback.format_exception(error))}")
