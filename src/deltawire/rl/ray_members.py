"""Members on a Ray cluster that exists already (the extra `ray` of deltawire). Every node needs deltawire installed.

Each member has an actor, which runs it in a separate process on the actor's node, as `deltawire fleet` does on one machine. The actor
keeps what the member prints until this process fetches it. Weights, leases and results do not go through Ray. They go through the store,
so every node needs credentials for the store: its own, or those that are passed in `environment`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from ..events import Event, OnEvent, printable
from ..fleet.local_members import LocalMember
from ..fleet.member_output import Line, OnLine, OutputBuffer, event_of
from ..fleet.supervision import PermanentFailure
from ..subscribe.pin_keeper import reader_name
from .member import MemberOptions

_LOOK = 0.5
"""Seconds after which an actor looks whether its member has ended, if the member prints nothing."""
_LONGEST_CALL = 10.0
"""Seconds that a call to an actor waits for output. A call must also end if its caller has died."""
_PATIENCE = 10.0
"""Seconds after which a member that waits for a node says so."""
_LONGEST_ERROR = 1 << 16
"""Largest number of characters of an error of Ray that are shown. The end is shown, because tracebacks say there what happened."""


class RayCluster:
    """Starts members on a Ray cluster. Members are spread over the nodes.

    Raises `ImportError` if ray is not installed, and `ConnectionError` if there is no cluster.

    Parameters
    ----------
    address
        Where the cluster is. By default it is the cluster that this machine belongs to.
    cpus
        How many processors one member takes of a node.
    gpus
        How many GPUs one member takes of a node.
    resources
        Further resources of Ray that one member takes of a node.
    environment
        Variables that members get in addition to those of their node.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        resources: Mapping[str, float] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise ImportError("Ray is not installed. Run `pip install ray`") from None
        self._ray: Any = ray
        self._owns_connection = not ray.is_initialized()
        if self._owns_connection:
            try:
                # Ray would print what it forwards on stdout, without the names of members.
                ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.WARNING)
            except ConnectionError as error:
                raise ConnectionError(
                    f"no Ray cluster was found ({error}). Start one with `ray start --head`, or give its address"
                ) from None
        wanted = {"CPU": cpus, "GPU": gpus, **(resources or {})}
        self._wanted = ", ".join(f"{amount:g} {name}" for name, amount in wanted.items() if amount) or "room for one more process"
        self._actor = ray.remote(
            num_cpus=cpus,
            num_gpus=gpus,
            resources=dict(resources or {}),
            max_restarts=0,  # `Supervisor` alone decides what is started again
            max_concurrency=4,  # other calls must not wait for `next_output`
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": dict(environment or {})},
        )(_MemberActor)

    def start(self, options: MemberOptions, *, on_line: OnLine | None = None, on_event: OnEvent | None = None) -> RayMember:
        """Start a member somewhere on the cluster. It waits until a node has room for it.

        Give `on_line` or `on_event`. Without both, lines are printed here, each after the name of the member. All of this happens while
        `RayMember.ending` is called, as `Supervisor` does several times a second.

        Parameters
        ----------
        options
            What the member does.
        on_line
            Called with every line that the member prints, in words for people.
        on_event
            Called with every event of the member. Each event has the fields `member` and `time`. Other output of the member, such as
            warnings, comes as an event "output".
        """
        name = options.name or reader_name()
        arguments = replace(options, name=name).to_arguments()
        forwarder = _EventForwarder(name, on_event) if on_event is not None else _LineForwarder(on_line or _printing(name))
        actor = self._actor.remote([*arguments, "--json"] if on_event is not None else arguments)
        return RayMember(self._ray, actor, forwarder, self._wanted)

    def close(self) -> None:
        """Disconnect from the cluster. Members that were started here and still run are killed."""
        if self._owns_connection:
            self._ray.shutdown()


class RayMember:
    """A member on the cluster; see `supervision.Running`. `RayCluster.start` makes them.

    Parameters
    ----------
    ray
        The module ray.
    actor
        The handle of the member's actor.
    forwarder
        Is given what the member prints.
    wanted
        The resources that the member needs, in words.
    clock
        Returns seconds that never run backwards.
    """

    def __init__(
        self, ray: Any, actor: Any, forwarder: _EventForwarder | _LineForwarder, wanted: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ray = ray
        self._actor = actor
        self._forwarder = forwarder
        self._wanted = wanted
        self._clock = clock
        self._began = clock()
        self._reported_waiting = False
        self._ending: str | None = None
        self._placed = actor.node.remote()
        self._batch = 0
        self._reply = actor.next_output.remote(self._batch)

    def ending(self) -> str | None:
        """See `supervision.Running`. Also forwards what the member has printed. Returns its end after everything that it printed."""
        while self._ending is None and self._is_there(self._reply):
            try:
                dropped, lines, ending = self._ray.get(self._reply)
            except self._ray.exceptions.ActorUnavailableError:  # unreachable for a moment or for ever; Ray finds out which
                self._reply = self._actor.next_output.remote(self._batch)
                break
            except self._ray.exceptions.RayError as error:  # the actor's process or node has died, or deltawire is missing there
                text = f"{type(error).__name__}: {error}"
                for line in text[-_LONGEST_ERROR:].splitlines():
                    self._forwarder.line(Line(line, is_error=True))
                self._ending = text.split("\n")[0]
                break
            if dropped:
                reason = f"{dropped} lines of output were dropped, because they came faster than they could be shown"
                self._forwarder.notice("output-dropped", reason, lines=dropped)
            for line in lines:
                self._forwarder.line(line)
            if ending is None:
                self._batch += 1
                self._reply = self._actor.next_output.remote(self._batch)
            else:
                self._ending = PermanentFailure(ending[0]) if ending[1] else ending[0]
        if self._ending is None and not self._reported_waiting and self._clock() - self._began >= _PATIENCE:
            self._reported_waiting = True
            if not self._is_there(self._placed):
                self._forwarder.notice("waiting", f"waits for a node of the Ray cluster that has {self._wanted} free (see `ray status`)")
        return self._ending

    def leave(self) -> None:
        """See `supervision.Running`."""
        if self._is_there(self._placed):
            self._actor.leave.remote()
        elif self._ending is None:  # no node runs it yet, so there is no process to ask
            self._ray.kill(self._actor)
            self._ending = ""

    def kill(self) -> None:
        """See `supervision.Running`. Ray also kills the member's process."""
        self._ray.kill(self._actor)

    def node(self) -> str:
        """Return the id of the node that it runs on. Waits until there is one."""
        return str(self._ray.get(self._placed))

    def _is_there(self, reference: Any) -> bool:
        done, _ = self._ray.wait([reference], timeout=0)
        return bool(done)


_Answer: TypeAlias = tuple[int, list[Line], tuple[str, bool] | None]
"""The number of lines that were dropped before these lines, the lines, and how the member ended.

The last is None while there may be more output. Otherwise it has the reason ("" if the member left as it should), and whether the member
would end again for it."""


class _MemberActor:
    """Runs on a node of the cluster: it starts a member there, and keeps what the member prints until the driver fetches it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._output = OutputBuffer()
        self._batch = -1
        self._answer: _Answer = (0, [], None)
        self._answering = threading.Lock()
        # Ray extends the Python path of this process only, for example by the driver's folder.
        path = os.pathsep.join(filter(None, sys.path))
        self._member = LocalMember(arguments, self._output.add, environment={"PYTHONPATH": path})

    def next_output(self, batch: int) -> _Answer:
        """Return the batch of output with this number, and wait a while for it.

        The driver asks for the next number only when it has this batch, and again for the same one if the answer did not arrive.
        """
        with self._answering:
            if batch != self._batch:
                self._answer = self._take()
                self._batch = batch
            return self._answer

    def _take(self) -> _Answer:
        deadline = time.monotonic() + _LONGEST_CALL
        while True:
            ending = self._member.ending()  # this is asked first, because the buffer then holds all that the member printed before its end
            dropped, lines = self._output.take(_LOOK if ending is None else 0.0)
            if dropped or lines:
                return dropped, lines, None
            if ending is not None:
                return 0, [], (str(ending), isinstance(ending, PermanentFailure))
            if time.monotonic() >= deadline:
                return 0, [], None

    def leave(self) -> None:
        """Ask the member to leave."""
        self._member.leave()

    def node(self) -> str:
        """Return the id of this node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())


class _EventForwarder:
    """Forwards what a member prints as events."""

    def __init__(self, name: str, on_event: OnEvent) -> None:
        self._name = name
        self._on_event = on_event

    def line(self, line: Line) -> None:
        self._forward(event_of(self._name, line.text, line.is_error))

    def notice(self, event: str, reason: str, **fields: int) -> None:
        self._forward(Event(event, {"member": self._name, "reason": reason, **fields}))

    def _forward(self, event: Event) -> None:
        _call_listener(self._on_event, event)


class _LineForwarder:
    """Forwards what a member prints as lines for people."""

    def __init__(self, on_line: OnLine) -> None:
        self._on_line = on_line

    def line(self, line: Line) -> None:
        _call_listener(self._on_line, line.text, line.is_error)

    def notice(self, event: str, reason: str, **fields: int) -> None:
        _call_listener(self._on_line, f"{time.strftime('%H:%M:%S')}  {reason}", True)


def _call_listener(listener: Callable[..., object], *arguments: object) -> None:
    try:
        listener(*arguments)
    except Exception:
        logging.getLogger("deltawire").exception("the listener to a member's output failed")


def _printing(name: str) -> OnLine:
    return lambda line, is_error: print(printable(f"{name}  {line}"), file=sys.stderr if is_error else sys.stdout, flush=True)
