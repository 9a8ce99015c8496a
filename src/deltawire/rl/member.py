"""A member of the fleet as one function call: `serve` does what `deltawire member` does, in your own process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..chain.reader_options import ReaderOptions
from ..errors import DeltawireError, EngineError, UnusableReward
from ..events import OnEvent, emit, with_fields
from ..fleet.generation import Generator
from ..fleet.member import Member, tell_failure
from ..fleet.update_times import UpdateTimes
from ..format.records.fleet_files import Row
from ..store import Store, StoreOptions
from ..subscribe.follow import pause
from ..subscribe.pin_keeper import reader_name
from .rewards import RewardFunction, load_reward, reward_name, score

_POLL = 0.5
_CLOSING = 3.0


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """The options of a member. All values are plain, so that they can be sent to another machine.

    Parameters
    ----------
    source
        The location of the chain.
    engine
        "transformers", or "vllm=URL" for a vLLM server.
    env
        The reward functions, each as MODULE:FUNCTION.
    name
        The member's name. No two members may share one. By default it is made from the host's name and a random number.
    device
        Where transformers puts the model. "auto" means a GPU if there is one.
    mirror
        The directory of a mirror from which vLLM's workers load full checkpoints. None if they load them from the store.
    trust
        Public keys. One of them must have signed every record of the chain.
    poll
        Seconds between two looks at the store.
    run
        The name that the run must have.
    kv_cache
        What a vLLM server does with keys and values of older weights: "drop", "keep" or "mark".
    canary
        What is checked after each update of a vLLM server: "off", "self" or "recorded".
    routing
        Whether to record which experts process which token, for a trainer that replays them. It needs a mixture-of-experts model, and
        `--enable-return-routed-experts` at a vLLM server.
    store
        How to reach the store. Only its limits `max_rate` and `max_requests` are passed on to other processes.
    host_cache
        Where members of one host share data files, so that one of them fetches each file for all: a directory, or "auto" for the usual
        ones. None shares nothing.
    relays
        Copies of the chain that relays keep. The member reads weights from them if they are nearer than `source`.
    find_relays
        Whether to read also from copies that relays have published in the run.
    channel
        The channel that the member follows. None follows the newest version.
    lora
        LoRA adapters that the vLLM server gets besides: for each, its name and the location of its chain.
    """

    source: str
    engine: str
    env: tuple[str, ...]
    name: str = ""
    device: str = "auto"
    mirror: str | None = None
    trust: tuple[str, ...] = ()
    poll: float = _POLL
    run: str | None = None
    kv_cache: Literal["drop", "keep", "mark"] = "drop"
    canary: Literal["off", "self", "recorded"] = "off"
    routing: bool = False
    store: StoreOptions | None = None
    host_cache: str | None = None
    relays: tuple[str, ...] = ()
    find_relays: bool = False
    channel: str | None = None
    lora: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.lora and self.engine == "transformers":
            raise ValueError("only vLLM servers get LoRA adapters, so `lora` needs the engine vllm=URL")

    def to_arguments(self) -> list[str]:
        """Return them as arguments of `deltawire member`."""
        arguments = [part for url in (self.source, *self.relays) for part in ("--from", url)]
        arguments += ["--engine", self.engine, "--device", self.device, "--poll", str(self.poll)]
        arguments += ["--relays"] if self.find_relays else []
        arguments += ["--kv-cache", self.kv_cache, "--canary", self.canary, *(["--routing"] if self.routing else [])]
        arguments += [part for spec in self.env for part in ("--env", spec)]
        arguments += [part for key in self.trust for part in ("--trust", key)]
        arguments += [part for name, url in self.lora for part in ("--lora", f"{name}={url}")]
        for option, value in (
            ("--name", self.name),
            ("--mirror", self.mirror),
            ("--run", self.run),
            ("--host-cache", self.host_cache),
            ("--channel", self.channel),
        ):
            arguments += [option, value] if value else []
        if self.store is not None and self.store.max_rate is not None:
            arguments += ["--max-rate", f"{self.store.max_rate:.3f}B"]
        if self.store is not None and self.store.max_requests is not None:
            arguments += ["--max-requests", str(self.store.max_requests)]
        return arguments


def parse_engine(text: str) -> str | None:
    """Return the URL of a vLLM server, or None for transformers. Raise `ValueError` for anything else."""
    if text == "transformers":
        return None
    from ..engines.http_session import check_server_url

    kind, _, url = text.partition("=")
    try:
        if kind == "vllm":
            return check_server_url(url)
    except ValueError:
        pass
    raise ValueError(f"{text!r} is not an engine: use `transformers`, or `vllm=http://127.0.0.1:8000` for a server on this machine")


def serve(
    options: MemberOptions, *, stop: threading.Event, on_event: OnEvent | None = None, clock: Callable[[], float] = time.time
) -> None:
    """Join the fleet and work until `stop` is set or the trainer ends the run.

    If the chain does not exist yet, the member waits for it. `serve` raises only errors that trying again does not cure: a reward that
    cannot be loaded (`UnusableReward`), a model that cannot be built (`EngineError`), a store that denies access, a broken chain.

    Parameters
    ----------
    options
        What the member needs to know.
    stop
        Set it to end the member. It finishes or gives back its task first.
    on_event
        Called with every event. Each event has the field `member`.
    clock
        The time that heartbeats carry, in seconds since 1970.
    """
    name = options.name or reader_name()
    on_event = with_fields(on_event, member=name)
    with _reader_options(options, name).open_store([options.source, *options.relays], on_event=on_event) as store:
        updates = UpdateTimes(on_event)
        try:
            scorer = RewardScorer([load_reward(spec) for spec in options.env])
            generator = _open_generator(options, name, store, stop, updates.listen)
        except Exception as error:
            tell_failure(store, name, error, clock=clock)
            raise
        if generator is None:
            return
        member = Member(
            store,
            generator,
            scorer,
            name=name,
            options=_reader_options(options, name),
            poll=options.poll,
            clock=clock,
            updates=updates,
            on_event=on_event,
        )
        opened = contextlib.ExitStack()
        opened.callback(generator.close)
        try:
            opened.enter_context(_following_adapters(options, on_event))
            member.run(stop)
        finally:
            closing = threading.Thread(target=opened.close, name="deltawire-member-closing", daemon=True)
            closing.start()
            closing.join(_CLOSING)  # the store may not answer


class RewardScorer:
    """Reward functions in the form that a `Member` calls."""

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self._functions = functions
        self.names = tuple(reward_name(function) for function in functions)
        if len(set(self.names)) != len(self.names):
            raise UnusableReward(f"two rewards have the same name ({', '.join(self.names)}). Rename one of the functions.")

    def __call__(
        self, rows: Sequence[Row], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]]
    ) -> list[tuple[float | None, ...]]:
        columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
        prompts = columns.pop("prompt")
        return score(self._functions, prompts, completions, completion_ids=completion_ids, columns=columns)


def _open_generator(options: MemberOptions, name: str, store: Store, stop: threading.Event, on_event: OnEvent | None) -> Generator | None:
    """Wait for the chain and return the engine, or None if `stop` was set first."""
    failures = 0
    while not stop.is_set():
        try:
            return _generator(options, name, store, on_event)
        except DeltawireError as error:
            if not error.retryable:
                raise
            failures += 1
            emit(on_event, "waiting", reason=str(error))
            stop.wait(pause(options.poll, min(failures, 4)))
    return None


def _generator(options: MemberOptions, name: str, store: Store, on_event: OnEvent | None) -> Generator:
    url = parse_engine(options.engine)
    if url is not None:
        from ..engines.base import KvCache
        from ..engines.vllm.driver.generation import VllmGenerator

        return VllmGenerator(
            store,
            url,
            options.mirror,
            options=_reader_options(options, name),
            poll=options.poll,
            kv_cache=KvCache(options.kv_cache),
            canary=options.canary,
            routing=options.routing,
            on_event=on_event,
        )
    _require_transformers()
    from .generation import TransformersGenerator

    return TransformersGenerator(
        store,
        device=pick_device(options.device),
        options=_reader_options(options, name),
        poll=options.poll,
        routing=options.routing,
        on_event=on_event,
    )


def _reader_options(options: MemberOptions, name: str) -> ReaderOptions:
    return ReaderOptions(
        run=options.run,
        trusted_keys=options.trust,
        reader=name,
        store=options.store,
        host_cache=options.host_cache,
        find_relays=options.find_relays,
        channel=options.channel,
    )


@contextlib.contextmanager
def _following_adapters(options: MemberOptions, on_event: OnEvent | None) -> Iterator[None]:
    """Keep the server at the newest versions of its LoRA adapters until the block ends."""
    url = parse_engine(options.engine)
    if url is None or not options.lora:
        yield
        return
    from ..engines.vllm.driver.lora_follower import LoraFollower, following

    settings = ReaderOptions(
        trusted_keys=options.trust, store=options.store, host_cache=options.host_cache, channel=options.channel
    )  # each adapter has a chain of its own, so its run and its relays are others, too
    followers = [LoraFollower(url, name, chain, options=settings, on_event=on_event) for name, chain in options.lora]
    with following(followers, poll=options.poll):
        yield


def _require_transformers() -> None:
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the package {error.name} is not installed. A member needs torch and transformers. Run `pip install torch transformers`"
        ) from None


def pick_device(name: str) -> str:
    """Return the device of a `--device` option. Raises `EngineError` if torch cannot use it here."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except Exception as error:  # torch has a kind of error for each reason
        reason = str(error).partition("\n")[0].rstrip(".")
        raise EngineError(f"the device {name!r} is not available here: {reason:.200}. Use --device cpu.") from error
    return name
