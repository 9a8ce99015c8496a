"""A client of the HTTP routes for weights of a vLLM server. They exist only if the server runs with `VLLM_SERVER_DEV_MODE=1`."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.parse
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ....errors import EngineError, EngineUnavailable
from ...base import KvCache
from ...http_session import Answer, HttpSession, NoAnswer, PendingAnswer, check_server_url, http_session

PauseMode = Literal["keep", "wait", "abort"]
"""Says what happens to requests in progress: "keep" continues them after the pause, "wait" finishes them first, "abort" ends them."""

_PROMPT, _PATIENT = 60.0, 600.0
"""Seconds to wait for an answer that needs no work, which a busy machine may still take long for, and for one that does."""
_CHECK_SECONDS = 5.0
"""Seconds between two checks whether a server that takes long to answer is still running."""


class EngineUnreachable(EngineUnavailable):
    """The server does not answer. It is starting, or it has ended."""

    hint = "Check that the server is running, and that this is its address."


class RouteFailed(EngineError):
    """The server answered with an error.

    Parameters
    ----------
    route
        The route of the request.
    status
        The HTTP status of the answer.
    text
        The beginning of the answer.
    hint
        What the user should do. None means the usual advice for the route.
    """

    def __init__(self, route: str, status: int, text: str, *, hint: str | None = None) -> None:
        self.status = status
        super().__init__(f"{route} failed with status {status}: {text}{_end(text)}", hint=hint or self.hint or _advice(route))


class WrongServer(RouteFailed):
    """The answer of a server shows that it is not vLLM, or that it was started without what deltawire needs. Waiting does not help."""

    hint = "Start vLLM with VLLM_SERVER_DEV_MODE=1, and give its URL without /v1."


_INIT = "/init_weight_transfer_engine"
_BACKEND_ADVICE = """Start vLLM with --weight-transfer-config '{"backend": "deltawire"}'."""


def _advice(route: str) -> str:
    return _BACKEND_ADVICE if route == _INIT else ""


def _end(text: str) -> str:
    return "" if text.endswith((".", "}")) else "."


def failed_route(route: str, answer: Answer) -> RouteFailed:
    """Return the error for an answer that is of no use.

    Parameters
    ----------
    route
        The route of the request.
    answer
        The answer of the server.
    """
    if route == _INIT and "transfer not configured" in answer.text:
        return WrongServer(route, answer.status, answer.text, hint=_BACKEND_ADVICE)
    is_unknown = answer.status == 404 and not route.startswith(("/v1/load_lora", "/v1/unload_lora", "/v1/completions"))
    return (WrongServer if is_unknown or answer.is_page else RouteFailed)(route, answer.status, answer.text)


WorkerStatus = dict[str, Any]
"""The status of one worker: the result of `DeltaWireBackend.status`, and `engine_core.engine_state`."""


@dataclass(frozen=True, slots=True)
class SwapAnswer:
    """The result of a swap in one call. engine_core.py describes the outcomes.

    Parameters
    ----------
    outcome
        "made", "refused", "asleep" or "quarantined".
    error
        What failed, or None.
    workers
        The status of each worker. Empty if the workers were not called.
    drain_ms
        Milliseconds until the steps in flight had ended.
    swap_ms
        Milliseconds from then on, until generation continued.
    preempted
        The number of requests whose keys and values were dropped.
    running
        Whether the server generates now.
    """

    outcome: str
    error: str | None
    workers: Sequence[WorkerStatus]
    drain_ms: float
    swap_ms: float
    preempted: int
    running: bool


class VllmRoutes:
    """Sends requests to a vLLM server. Each method is one request, and raises `EngineUnreachable` or `RouteFailed` if it fails.

    The first request starts a thread, which sends this and all later requests. It ends with `close`, or when nothing refers to the object.

    Parameters
    ----------
    url
        The address of the server, such as http://127.0.0.1:8000. Anything else raises `ValueError`.
    patience
        Seconds that a request which changes the server may take.
    """

    def __init__(self, url: str, *, patience: float = _PATIENT) -> None:
        self.url = check_server_url(url)
        self._patience = patience
        self._lock = threading.Lock()
        self._open: contextlib.ExitStack | None = None
        self._session: HttpSession | None = None
        self.requests = 0
        """The number of requests that were sent. Checks whether a slow server is still running do not count."""

    def close(self) -> None:
        """End the thread that sends requests. A later request starts another."""
        with self._lock:
            resources, self._open, self._session = self._open, None, None
        if resources is not None:
            resources.close()

    def weight_version(self, seconds: float = _PROMPT) -> str:
        """Return the label that the last update gave to the weights, or "default" if there was no update.

        Parameters
        ----------
        seconds
            Seconds that the server may take to answer.
        """
        return str(self._get("/weight_info", seconds)["weight_version"])

    def release(self) -> str | None:
        """Return the release of vLLM, such as "0.32.0". None if the server does not tell it."""
        try:
            return str(self._get("/version")["version"])
        except (RouteFailed, KeyError, TypeError):
            return None

    def backend(self) -> str | None:
        """Return the name of the server's backend for weights. None if the server does not tell it."""
        try:
            return str(self._get("/server_info?config_format=json")["vllm_config"]["weight_transfer_config"]["backend"])
        except (RouteFailed, KeyError, TypeError):
            return None

    def is_paused(self, seconds: float = _PROMPT) -> bool:
        """Return whether the server is paused.

        Parameters
        ----------
        seconds
            Seconds that the server may take to answer.
        """
        return bool(self._get("/is_paused", seconds)["is_paused"])

    def checksums(self) -> dict[str, str]:
        """Return a hash of each tensor of each worker, as vLLM computes them."""
        return dict(self._post("/weight_checker", {"action": "checksum"})["checksums"])

    def model(self) -> str:
        """Return the name of the model for requests."""
        return str(self._get("/v1/models")["data"][0]["id"])

    def settings(self) -> tuple[str | None, str | None]:
        """Return the kind of log-probs that the server reports ("raw_logprobs", "processed_logprobs", …) and its device ("cuda", "cpu").

        A value is None if the server does not tell it.
        """
        try:
            config = self._get("/server_info?config_format=json")["vllm_config"]
            mode, runs_on = config["model_config"].get("logprobs_mode"), config.get("device_config", {})
            device = runs_on.get("device_type") or runs_on.get("device")  # vLLM 0.32 has the latter
        except (RouteFailed, KeyError, TypeError, AttributeError):
            return None, None
        return mode and str(mode), device and str(device).partition(":")[0]

    def check_alive(self) -> None:
        """Raise `EngineUnreachable` or `RouteFailed` if the server, or the engine process behind it, has ended."""
        self._get("/health")

    def complete(self, body: Mapping[str, Any]) -> Any:
        """Return the answer to a request for completions (`/v1/completions`)."""
        return self._post("/v1/completions", body)

    def adapters(self) -> dict[str, str]:
        """Return the LoRA adapters that requests can name, with the directory of each."""
        return {str(card["id"]): str(card.get("root")) for card in self._get("/v1/models")["data"] if card.get("parent")}

    def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter. The server must run with `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.

        Parameters
        ----------
        name
            The name by which requests choose it. It must be new.
        folder
            Its directory, which must stay until the adapter is unloaded.
        """
        self._send("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Requests that name it are then refused."""
        self._send("/v1/unload_lora_adapter", {"lora_name": name})

    def most_adapters(self) -> int | None:
        """Return how many LoRA adapters the server can use at the same time (`--max-loras`). None if it does not tell."""
        try:
            config = self._get("/server_info?config_format=json")["vllm_config"].get("lora_config")
            return None if config is None else int(config["max_loras"])
        except (RouteFailed, KeyError, TypeError, ValueError, AttributeError):
            return None

    def used_adapters(self) -> frozenset[str] | None:
        """Return the directories of the LoRA adapters that requests use at this moment. None if the server does not tell."""
        answers = self._ask_for_adapters()
        return frozenset(str(folder) for answer in answers for folder in answer["used"]) if answers else None

    def is_asleep(self) -> bool:
        """Return whether the server is asleep. A server without the backend `deltawire` also says so while it is paused."""
        answers = self._ask_for_adapters()
        if answers:
            return any(answer["asleep"] for answer in answers)
        try:
            return bool(self._get("/is_sleeping")["is_sleeping"])
        except (RouteFailed, KeyError, TypeError):  # a server without this route does not sleep
            return False

    def _ask_for_adapters(self) -> list[dict[str, Any]]:
        """Ask EngineCore (engine_core.py). Returns an empty list if the server does not tell."""
        try:
            if self.backend() != "deltawire":  # the workers of another server do not know the call
                return []
            answers: list[dict[str, Any]] = self.call_workers("deltawire_adapters")
            return answers if all({"used", "asleep"} <= answer.keys() for answer in answers) else []
        except (RouteFailed, KeyError, TypeError, AttributeError):
            return []

    def initialise(self, info: Mapping[str, Any]) -> None:
        """Tell all workers where versions come from. `InitInfo` in backend.py describes the fields."""
        self._post(_INIT, {"init_info": dict(info)})

    def learn(self, table: Path) -> list[dict[str, Any]]:
        """Let all workers learn where they keep the tensors of a chain, which the file of a table names. Returns their status."""
        return self.call_workers("deltawire_learn", str(table.absolute()))

    def adopt(self, commit: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Let all workers take their weights for those of a commit (`CommitRef.plain`), if the digest is right. Returns their status."""
        return self.call_workers("deltawire_adopt", dict(commit))

    def prepare(self, seq: int) -> list[dict[str, Any]]:
        """Let all workers begin to stage a version. Returns their status."""
        return self.call_workers("deltawire_prepare", seq)

    def status(self) -> list[dict[str, Any]]:
        """Return the status of each worker."""
        return self.call_workers("deltawire_status")

    def settle(self) -> list[dict[str, Any]]:
        """End an update that was begun and abandoned, because vLLM begins no other before. Returns the status of each worker."""
        return self.call_workers("deltawire_settle")

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause the server. It may be paused already."""
        query = urllib.parse.urlencode({"mode": mode, "clear_cache": str(clear_cache).lower()})
        self._post(f"/pause?{query}", None)

    def swap(self, seq: int | list[int], label: str, kv_cache: KvCache, *, anew: bool = False) -> SwapAnswer:
        """Swap between two steps, in one request. Only servers whose status says `one_call` have it.

        Parameters
        ----------
        seq
            The number of the version's commit, which all workers have staged. Or a list: the numbers of the versions on the way, of which
            they have staged the first, and of the version.
        label
            The label of the new weights.
        kv_cache
            What happens to keys and values that the old weights computed.
        anew
            True to load all weights.
        """
        results = self.call_workers("deltawire_swap", seq, label, kv_cache.value, anew)
        try:
            (told,) = results
            return SwapAnswer(**{name: told[name] for name in SwapAnswer.__slots__})
        except (KeyError, TypeError, ValueError) as error:
            raise RouteFailed("/collective_rpc", 200, f"the answer cannot be read: {error!r}") from error

    def quarantine(self, reason: str) -> list[dict[str, Any]]:
        """Let the server end its requests and stay paused until a version is loaded anew. Returns the status of each worker.

        Parameters
        ----------
        reason
            Why its weights, or its results, are wrong.
        """
        return self.call_workers("deltawire_quarantine", reason)

    def pause_lease(self, seconds: float) -> None:
        """Let the server continue by itself if a pause that begins now lasts longer than this. engine_holds.py tells when it does."""
        self.call_workers("deltawire_lease", seconds)

    def start_update(self) -> None:
        """Begin an update of a paused server."""
        self._post("/start_weight_update", None)

    def update(self, seq: int, *, anew: bool = False) -> None:
        """Let all workers write a version, and confirm it. With `anew`, they load all weights."""
        self._post("/update_weights", {"update_info": {"seq": seq, "anew": anew}})

    def finish_update(self, weight_version: str | None) -> None:
        """End an update, and give its label to the weights."""
        self._post("/finish_weight_update", {"weight_version": weight_version})

    def label(self, weight_version: str) -> None:
        """Give another label to the weights. Completions are attributed to it from now on."""
        self._post("/update_weight_version", {"new_version": weight_version})

    def resume(self) -> None:
        """Resume the server."""
        self._post("/resume", None)

    def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker. Returns the result of each."""
        return list(self._post("/collective_rpc", {"method": method, "args": list(arguments)})["results"])

    def _get(self, route: str, seconds: float = _PROMPT) -> Any:
        return self._ask("GET", route, None, seconds)

    def _post(self, route: str, body: Mapping[str, Any] | None) -> Any:
        return self._ask("POST", route, body, self._patience)

    def _send(self, route: str, body: Mapping[str, Any]) -> None:
        """Send a request whose answer is plain text."""
        self._ask("POST", route, body, self._patience, is_json=False)

    def _ask(self, method: str, route: str, body: Mapping[str, Any] | None, timeout: float, *, is_json: bool = True) -> Any:
        try:
            session = self._connected()
            pending = session.begin(method, route, body, timeout=timeout)
            try:
                self._await(session, pending, route, timeout)
                answer = pending.answer()
            finally:
                pending.cancel()
            if not 200 <= answer.status < 300 or (is_json and answer.is_page):
                raise failed_route(route, answer)
            return json.loads(answer.content or b"null") if is_json else None
        except (NoAnswer, ValueError) as error:  # also a connection that breaks while the answer arrives
            raise EngineUnreachable(f"{error}.") from error

    def _connected(self) -> HttpSession:
        """Return the session of this client, and count a request. Opens the session if needed."""
        with self._lock:
            self.requests += 1
            if self._session is None:
                resources = contextlib.ExitStack()
                self._session = resources.enter_context(http_session(self.url))
                self._open = resources
                weakref.finalize(self, resources.close)
            return self._session

    def _await(self, session: HttpSession, pending: PendingAnswer, route: str, timeout: float) -> None:
        """Return when the request has ended. Raises `NoAnswer` if it takes too long, or if the server will not answer.

        A server whose engine process has died never answers its clients, and waits for them to disconnect.
        """
        deadline = time.monotonic() + timeout
        left = timeout
        while not pending.wait(min(_CHECK_SECONDS, left)):
            left = deadline - time.monotonic()
            if left <= 0:
                raise NoAnswer(f"{self.url}{route}: no answer after {timeout:.0f} s")
            if _has_ended(session, min(_PROMPT, left)):
                raise NoAnswer(f"{self.url}{route}: the server, or its engine, has ended")


def _has_ended(session: HttpSession, seconds: float) -> bool:
    """Return whether the server accepts no requests, or reports that its engine has died. A slow server has not ended."""
    try:
        return session.ask("GET", "/health", timeout=seconds).status >= 400
    except NoAnswer as error:
        return error.refused
