"""`deltawire sidecar --engine URL --from URL`."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options.adapters import LoraOption, read_adapters, start_followers, with_adapters
from ..options.chain import HostCacheOption, PinOption, RelaysOption, RunOption, TrustOption, check_urls, reader_options
from ..options.channels import ChannelOption
from ..options.common import JsonLinesOption, ThreadsOption, VerboseOption
from ..options.engine import Cache, CacheOption, Canary, CanaryOption, check_engine_url
from ..options.member import check_member_name
from ..options.metrics import MetricsOption, counted
from ..options.network import MaxRateOption, MaxRequestsOption, store_options
from ..output import figures
from ..output.event_notices import notice_of, print_if_verbose
from ..output.terminal import print_json_line, print_line, print_notice
from ..process.ending import Ending
from ..process.exit_codes import exit_codes

_LONGEST_ENDING = 60.0
"""The command ends at most this many seconds after a signal."""

if TYPE_CHECKING:
    from ...engines.vllm.driver.lora_follower import LoraFollower
    from ...engines.vllm.driver.sidecar import Sidecar
    from ...events import Event


class Pause(str, enum.Enum):
    keep = "keep"
    wait = "wait"
    abort = "abort"


class SwapBy(str, enum.Enum):
    call = "call"
    routes = "routes"


class Confirm(str, enum.Enum):
    auto = "auto"
    written = "written"
    everything = "everything"


def sidecar(
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="URL",
            help="The URL of the vLLM server, such as http://127.0.0.1:8000.",
            show_default=False,
            callback=check_engine_url,
        ),
    ],
    sources: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="URL",
            help="The chain's location, as for `follow`. Further ones are copies that relays keep. Only with --lora may it be left out.",
            show_default=False,
            callback=check_urls,
        ),
    ] = None,
    mirror: Annotated[
        Path | None,
        typer.Option(
            "--mirror",
            metavar="DIR",
            help="Let the server load full checkpoints from a mirror in this directory, and not from the store.",
            show_default=False,
        ),
    ] = None,
    spool: Annotated[
        Path | None,
        typer.Option(
            "--spool", metavar="DIR", help="Keep the next deltas in this directory instead of one in /dev/shm.", show_default=False
        ),
    ] = None,
    pause: Annotated[
        Pause,
        typer.Option("--pause", help="At a swap, let running requests continue afterwards, finish them first, or abort them."),
    ] = Pause.keep,
    kv_cache: CacheOption = Cache.drop,
    confirm: Annotated[
        Confirm,
        typer.Option(
            "--confirm",
            metavar="CHECK",
            help="Check by digest in the swap if that is quick (auto), by digest after it (written), or read all back in it (everything).",
        ),
    ] = Confirm.auto,
    gpu_share: Annotated[
        float | None,
        typer.Option(
            "--gpu-share",
            min=0.001,
            max=1,
            metavar="X",
            help="Let decoding take this share of the GPU's time: 0.025 by default, 1 decodes as fast as possible.",
            show_default=False,
        ),
    ] = None,
    undo_bytes: Annotated[
        int | None,
        typer.Option(
            "--undo-bytes",
            min=0,
            metavar="BYTES",
            help="Let each worker keep its last updates in this much memory, for quick rollbacks: 512 MiB with --channel, else 0.",
            show_default=False,
        ),
    ] = None,
    canary: CanaryOption = Canary.off,
    swap: Annotated[
        SwapBy, typer.Option("--swap", help="Swap in one call if the server can, or always by vLLM's routes, which takes longer.")
    ] = SwapBy.call,
    lora: LoraOption = None,
    channel: ChannelOption = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="The name of this engine in the store.", show_default=False, callback=check_member_name
        ),
    ] = None,
    ready: Annotated[
        str | None,
        typer.Option("--ready", metavar="HOST:PORT", help="Answer GET /ready here: 200 if the server serves a version, otherwise 503."),
    ] = None,
    poll: Annotated[float, typer.Option("--poll", min=0.01, metavar="SECONDS", help="Look for the next version this often.")] = 0.5,
    trust: TrustOption = None,
    run: RunOption = None,
    pin: PinOption = True,
    relays: RelaysOption = False,
    max_rate: MaxRateOption = None,
    max_requests: MaxRequestsOption = None,
    host_cache: HostCacheOption = "off",
    metrics: MetricsOption = None,
    threads: ThreadsOption = None,
    verbose: VerboseOption = False,
    json: JsonLinesOption = False,
) -> None:
    """Keep a running vLLM server up to date with the newest version of a chain, or with a channel.

    Start the server on the same machine with `VLLM_SERVER_DEV_MODE=1` and `--weight-transfer-config '{"backend": "deltawire"}'`. The
    sidecar fetches deltas, and the server decodes them against its own weights while it generates. The server is paused only while the
    changed weights are written and checked. If it must load a full checkpoint, such as its first version, it does so from the store, with
    its own credentials, or from a mirror. Sidecar and server may be restarted at any time. If the weights of the server are in an unknown
    state, it stays paused until it has loaded a full checkpoint.

    The command prints a line per version. Ctrl-C and SIGTERM end it with code 0.
    """
    adapters = read_adapters(lora)
    if not sources and not adapters:
        raise typer.BadParameter("name the chain of the weights with --from, or that of a LoRA adapter with --lora.", param_hint="--from")
    if not sources and canary is not Canary.off:
        raise typer.BadParameter("--canary checks versions of the weights, so name their chain with --from.", param_hint="--canary")
    with exit_codes(json, one_line=True), Ending(_LONGEST_ENDING) as ending, contextlib.ExitStack() as stack:
        from ...engines.base import KvCache
        from ...engines.vllm.driver.lora_follower import following
        from ...engines.vllm.driver.sidecar import Sidecar

        printing = ending.with_output(_print_as_json if json else _Listener(verbose))
        on_event = stack.enter_context(counted(metrics, printing, name))
        limits = store_options(max_rate, max_requests)  # full checkpoints are read by the server, without these limits
        reading = partial(reader_options, pin=pin, store=limits, host_cache=host_cache, channel=channel)
        followers = start_followers(adapters, engine, spool, reading(None, trust), on_event)
        driver = (
            None
            if not sources
            else Sidecar(
                engine,
                sources,
                mirror,
                pause=pause.value,
                kv_cache=KvCache(kv_cache.value),
                confirm=confirm.value,
                canary=canary.value,
                spool=spool,
                one_call=swap is SwapBy.call,
                options=reading(run, trust, reader=name, relays=relays),
                threads=threads,
                gpu_share=gpu_share,
                undo_bytes=undo_bytes,
                on_event=on_event,
            )
        )
        try:
            with _answering(ready, engine, driver, followers), following(followers, poll=poll):
                driver.run(poll=poll) if driver is not None else threading.Event().wait()
        except KeyboardInterrupt:
            return
        finally:
            if driver is not None:
                driver.close()


@contextlib.contextmanager
def _answering(address: str | None, engine: str, driver: Sidecar | None, followers: Sequence[LoraFollower]) -> Iterator[None]:
    """Answer GET /ready, if the user asked for it."""
    from ...engines.vllm.driver.readiness import ReadinessRoute, ServerProbe

    def check() -> tuple[bool, Mapping[str, Any]]:
        return with_adapters((True, {}) if driver is None else driver.readiness(), followers)

    if address is None:
        yield
        return
    with contextlib.closing(ServerProbe(engine, check)) as probe:
        try:
            route = ReadinessRoute(address, probe)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--ready") from error
        with route:
            yield


def _print_as_json(event: Event) -> None:
    print_json_line(event.to_json())


class _Listener:
    """Prints a line per version, and a notice about each problem, once while the problem lasts."""

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = verbose
        self._reported: str | None = None

    def __call__(self, event: Event) -> None:
        print_if_verbose(event, self._verbose)
        fields = event.fields
        if event.name == "swapped":
            self._reported = None
            parts = [
                f"version {fields['updates']}",
                "" if fields["step"] is None else f"step {fields['step']}",
                f"paused {1e3 * float(fields['pause_seconds'] or 0):.0f} ms",
                f"{figures.duration(float(fields['behind_seconds'] or 0))} after it was published",
                "full checkpoint loaded" if fields["loaded_anew"] else "",
            ]
            print_line("  ".join(filter(None, parts)))
        elif event.name == "engine-quarantined":
            self._notice(
                f"the update to version {fields['updates']} failed; the server stays paused until a full checkpoint is loaded: "
                f"{fields['reason']}"
            )
        elif event.name == "engine-held":
            self._notice(f"the server answers no requests: {fields['reason']}")
        elif event.name == "adopted":
            print_line(f"version {fields['updates']}  the server was started with it")
        elif event.name == "adapter-loaded":
            print_line(f"adapter {fields['adapter']}")
        elif event.name == "adapter-failed":
            self._notice(f"the adapter {fields['adapter']} is not at its newest version; will try again: {fields['reason']}")
        elif event.name == "draft-kept":
            self._notice(f"the draft model is not updated: {fields['reason']}")
        elif event.name == "mirror-used":
            self._notice(f"full checkpoints are loaded from a mirror: {fields['reason']}")
        elif event.name == "canary-learnt":
            self._notice(f"log-probs of decoding and prompts differ by {fields['largest']:.2g} at first; the canary allows for it")
        elif event.name == "canary-missing":
            self._notice(f"version {fields['updates']} is not compared with recorded tokens: {fields['reason']}")
        elif event.name == "attachments-changed":
            self._notice(f"these files changed; restart the server to use them: {fields['files']}")
        elif event.name == "repaired":
            self._notice(f"version {fields['updates']} was loaded as a full checkpoint")
        elif event.name == "waiting":
            self._notice(f"waits for the server: {fields['reason']}")
        elif event.name == "sync-failed" and not fields.get("retryable"):
            return  # the error is raised, too
        elif event.name in ("swap-failed", "sync-failed", "engine-lost", "report-failed"):
            self._notice(f"will try again: {fields['reason']}")
        elif (notice := notice_of(event)) is not None:
            self._notice(notice)

    def _notice(self, notice: str) -> None:
        if notice != self._reported:
            self._reported = notice
            print_notice(notice)
