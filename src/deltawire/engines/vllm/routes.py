"""A client of the HTTP routes of a vLLM server that have to do with weights. They exist if it runs with `VLLM_SERVER_DEV_MODE=1`."""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any, Literal

from ...errors import EngineError, EngineUnavailable
from ..http_session import HttpSession, NoAnswer, PendingAnswer, http_session

PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of requests that are being answered: they wait and then go on; they are finished first; they are ended."""

_PROMPT, _PATIENT = 60.0, 600.0
"""Seconds to wait for an answer that needs no work, which a busy machine may still take long for, and for one that does."""
_LOOK = 5.0
"""Seconds between two looks at whether a server that is long in answering is still there."""


class EngineUnreachable(EngineUnavailable):
    """The server does not answer. It is starting, or it has ended."""

    hint = "Check that the server is running, and that this is its address."


class RouteFailed(EngineError):
    """The server answered with an error."""

    def __init__(self, route: str, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"{route} failed with status {status}: {text}")


class VllmRoutes:
    """The server at a URL such as http://127.0.0.1:8000. Each method is one request; `EngineUnreachable` or `RouteFailed` if it fails."""

    def __init__(self, url: str, *, patience: float = _PATIENT) -> None:
        self.url = url.rstrip("/")
        self._patience = patience

    def weight_version(self) -> str:
        """What the last update called itself; "default" if there was none."""
        return str(self._get("/weight_info")["weight_version"])

    def is_paused(self) -> bool:
        return bool(self._get("/is_paused")["is_paused"])

    def checksums(self) -> dict[str, str]:
        """A hash of each tensor of each worker, as vLLM computes them."""
        return dict(self._post("/weight_checker", {"action": "checksum"})["checksums"])

    def model(self) -> str:
        """What requests must call the model."""
        return str(self._get("/v1/models")["data"][0]["id"])

    def settings(self) -> tuple[str | None, str | None]:
        """Which log-probs the server reports ("raw_logprobs", "processed_logprobs", …), and on what it runs ("cuda", "cpu", …).

        None for what it does not tell.
        """
        try:
            config = self._get("/server_info?config_format=json")["vllm_config"]
            mode, runs_on = config["model_config"].get("logprobs_mode"), config.get("device_config", {})
            device = runs_on.get("device_type") or runs_on.get("device")  # vLLM 0.32 has the latter
        except (RouteFailed, KeyError, TypeError, AttributeError):
            return None, None
        return mode and str(mode), device and str(device).partition(":")[0]

    def check_alive(self) -> None:
        """`EngineUnreachable` or `RouteFailed` if the server is gone, or its engine is dead behind it."""
        self._get("/health")

    def initialise(self, info: Mapping[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": dict(info)})

    def prepare(self, version: int) -> list[dict[str, Any]]:
        """Let all workers begin to stage a version; what they have."""
        return self.call_workers("deltawire_prepare", version)

    def status(self) -> list[dict[str, Any]]:
        """What the workers have."""
        return self.call_workers("deltawire_status")

    def settle(self) -> list[dict[str, Any]]:
        """End an update that was begun and left: vLLM lets no other begin before. What the workers have."""
        return self.call_workers("deltawire_settle")

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        query = urllib.parse.urlencode({"mode": mode, "clear_cache": str(clear_cache).lower()})
        self._post(f"/pause?{query}", None)

    def start_update(self) -> None:
        self._post("/start_weight_update", None)

    def update(self, version: int, *, anew: bool = False) -> None:
        self._post("/update_weights", {"update_info": {"version": version, "anew": anew}})

    def finish_update(self, weight_version: str | None) -> None:
        self._post("/finish_weight_update", {"weight_version": weight_version})

    def label(self, weight_version: str) -> None:
        """Set what `weight_version` returns, and what completions are attributed to, from now on."""
        self._post("/update_weight_version", {"new_version": weight_version})

    def resume(self) -> None:
        self._post("/resume", None)

    def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker; what each returns."""
        return list(self._post("/collective_rpc", {"method": method, "args": list(arguments)})["results"])

    def _get(self, route: str) -> Any:
        return self._ask("GET", route, None, _PROMPT)

    def _post(self, route: str, body: Mapping[str, Any] | None) -> Any:
        return self._ask("POST", route, body, self._patience)

    def _ask(self, method: str, route: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        try:
            with http_session(self.url) as session:
                pending = session.begin(method, route, body, timeout=timeout)
                self._await(session, pending, route, timeout)
                answer = pending.answer()
            if not 200 <= answer.status < 300:
                raise RouteFailed(route, answer.status, answer.text)
            return json.loads(answer.content or b"null")
        except (NoAnswer, ValueError) as error:  # also a connection that breaks half-way
            raise EngineUnreachable(f"{error}.") from error

    def _await(self, session: HttpSession, pending: PendingAnswer, route: str, timeout: float) -> None:
        """Return when the request is over. Raises `NoAnswer` if it takes too long, or there will be no answer.

        A server whose engine has died waits for its clients to hang up before it ends, and never answers them.
        """
        deadline = time.monotonic() + timeout
        while not pending.wait(_LOOK):
            if time.monotonic() > deadline:
                raise NoAnswer(f"{self.url}{route}: no answer after {timeout:.0f} s")
            if _has_ended(session):
                raise NoAnswer(f"{self.url}{route}: the server, or its engine, has ended")


def _has_ended(session: HttpSession) -> bool:
    """Whether the server takes no more requests, or says itself that its engine is dead. A server that is slow to answer has not ended."""
    try:
        return session.ask("GET", "/health", timeout=_PROMPT).status >= 400
    except NoAnswer as error:
        return error.refused
