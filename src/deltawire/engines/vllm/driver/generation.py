"""Completions from a vLLM server whose weights follow a chain. This process drives the server.

Most servers report which weights made which token (token_route.py), and the sidecar labels weights with the number of their commit, so each
token is attributed exactly. Other servers have only /v1/completions, which does not report it. Then a whole completion is attributed to the
oldest version that was served between the request and its answer. This is safe, because staleness counts from the oldest version.

If the server runs with `--logprobs-mode processed_logprobs`, log-probs belong to the distribution that tokens were drawn from. With vLLM's
default they belong to temperature 1 and top_p 1. A server that reports this default is refused for any other sampling.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....chain.reader_options import ReaderOptions
from ....chain.version import Version
from ....errors import DeltawireError, EngineError, EngineRefused, EngineUnavailable, VersionUnknown
from ....events import OnEvent, emit
from ....fleet.generation import Generated, GeneratedSpan, Interrupted, Stop, never
from ....format.records.trainer_records import Sampling
from ....format.routing import RecordedExperts
from ....store import Store
from ....subscribe.model_files import FollowedFiles
from ...base import KvCache
from ...http_session import NoAnswer, PendingAnswer, http_session
from ...prompts import Prompts
from ...routed_experts import ModelRouters, fill_prompts, read_captured_experts, read_vllm_experts, routers_of_files
from .routes import EngineUnreachable, RouteFailed, VllmRoutes
from .server_canary import CanaryKind
from .sidecar import Sidecar
from .token_route import TOKEN_ROUTE, LabelledTokens, read_choice, token_request
from .worker_experts import WorkerExperts

_PLAIN_ROUTE = "/v1/completions"
_STOP_CHECK_SECONDS = 0.05
_HEALTH_CHECK_SECONDS = 5.0
_REQUEST_SECONDS = 3600.0
"""The server may take this long for one request."""


class VllmGenerator:
    """Generates completions with a vLLM server, and keeps the server at the newest version of a chain.

    It is a `deltawire.fleet.generation.Generator`. Start the server as for `deltawire sidecar`, but do not run `deltawire sidecar` at the
    same time, because only one process may drive the server. The requests for all prompts are sent at once, and the server batches them.

    Parameters
    ----------
    store
        The store of the chain.
    url
        The address of the server.
    mirror
        The directory of a mirror, from which the server's workers load full checkpoints. With None, they load them from the store, with
        their own credentials.
    options
        Which chain to accept, and how to read it.
    poll
        Seconds between two looks for a new version.
    kv_cache
        What happens to keys and values that the old weights computed. With `MARK`, each request names the version that the server has
        (`cache_salt`), so it uses no keys and values of older weights, and a swap drops none.
    canary
        What to check after each update: "off", "self" or "recorded", as for `Sidecar`.
    routing
        Whether to keep the experts that processed each token. The server needs `--enable-return-routed-experts`. That of vLLM's CPU build,
        which refuses it, needs `--enable-scale-out`, and its workers record them.
    on_event
        Called with each event of the sidecar, and with "routing-unusable".
    """

    engine = "vllm"
    """The name of the engine, for heartbeats. Its release follows as soon as the server tells it."""

    def __init__(
        self,
        store: Store,
        url: str,
        mirror: Path | str | None = None,
        *,
        options: ReaderOptions | None = None,
        poll: float = 0.5,
        kv_cache: KvCache = KvCache.DROP,
        canary: CanaryKind = "off",
        routing: bool = False,
        on_event: OnEvent | None = None,
    ) -> None:
        self._log = (options or ReaderOptions()).open_log(store)
        self._routes = VllmRoutes(url)
        self._prompts = FollowedFiles(store, Prompts.of, options=options)
        self._sidecar = Sidecar(url, store, mirror, kv_cache=kv_cache, canary=canary, options=options, on_event=on_event)
        self._marks_requests = kv_cache is KvCache.MARK
        self._routing = routing
        self._on_event = on_event
        self._problem_of_routing: str | None = None
        self._poll = poll
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._model: str | None = None
        self._has_exact_route = True
        self._logprobs_mode: str | None = None
        self._device: str | None = None

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Return the token ids of each row's prompt, by the tokenizer of the version that the server has."""
        return self._prompts.at(self.version).encode(rows)

    def decode(self, rows: Sequence[Mapping[str, Any]], tokens: Sequence[Sequence[int]]) -> list[Any]:
        """Return completions as reward functions get them, by the tokenizer of the version that the server has."""
        return self._prompts.at(self.version).decode(rows, tokens)

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._drive, name="deltawire-vllm-sidecar", daemon=True)
            self._thread.start()

    @property
    def version(self) -> Version | None:
        return self._sidecar.served

    @property
    def problem(self) -> Exception | None:
        return self._failure

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, stop: Stop = never) -> list[Generated]:
        before = self._served()
        self._check_server(sampling)
        try:
            bodies = [self._body(prompt, sampling, sampling.seed + number, before) for number, prompt in enumerate(prompts)]
            experts = WorkerExperts(self._routes, bodies) if self._captures_experts() else None
            answers = self._answers(bodies, stop)
            if experts is not None:
                experts.add_to(answers)
            routers = routers_of_files(self._prompts.first) if self._routing else None
        except EngineUnreachable as failure:
            raise EngineUnavailable(f"the server was lost: {failure}") from failure
        except RouteFailed as failure:
            if failure.status in (403, 404) and self._has_exact_route:
                self._has_exact_route = False
                return self.generate(prompts, sampling, stop=stop)
            raise EngineUnavailable(str(failure)) from failure
        pairs = zip(prompts, answers, strict=True)
        return [made for prompt, answer in pairs for made in self._read(answer, sampling, before, routers, len(prompt))]

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._sidecar.close()
        self._routes.close()

    def _drive(self) -> None:
        try:
            self._sidecar.run(poll=self._poll, stop=self._stop)
        except Exception as error:
            self._failure = error

    def _answers(self, bodies: Sequence[tuple[str, dict[str, Any]]], stop: Stop) -> list[Any]:
        """Send all requests at once. Returns their answers in order. An exception cancels all of them."""
        with http_session(self._routes.url) as session:
            requests = [(route, session.begin("POST", route, body, timeout=_REQUEST_SECONDS)) for route, body in bodies]
            checked = time.monotonic()
            while not all(pending.wait(_STOP_CHECK_SECONDS) for _, pending in requests):
                if stop():
                    raise Interrupted
                if time.monotonic() - checked > _HEALTH_CHECK_SECONDS:  # a server whose engine has died may never answer
                    self._routes.check_alive()
                    checked = time.monotonic()
            return [_content(route, pending) for route, pending in requests]

    def _served(self) -> Version:
        served = self._sidecar.served
        if served is None:
            raise self._failure or EngineUnavailable(f"the server at {self._routes.url} has no version of the chain yet.")
        return served

    def _check_server(self, sampling: Sampling) -> None:
        """Get the name of the server's model, and check that its log-probs belong to the distribution that tokens are drawn from."""
        try:
            if self._model is None:
                self._model = self._routes.model()
                self._logprobs_mode, self._device = self._routes.settings()
                if (release := self._routes.release()) is not None:
                    self.engine = f"vllm {release}"
        except (EngineUnreachable, RouteFailed) as error:
            raise EngineUnavailable(str(error)) from error
        if self._logprobs_mode == "raw_logprobs" and (sampling.temperature, sampling.top_p) != (1.0, 1.0):
            raise EngineRefused(
                f"the vLLM server at {self._routes.url} reports log-probs without temperature and top_p. "
                "Start it with --logprobs-mode processed_logprobs."
            )

    def _body(self, prompt: Sequence[int], sampling: Sampling, seed: int, served: Version) -> tuple[str, dict[str, Any]]:
        own = {
            "n": sampling.samples,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # On a CPU, vLLM 0.32 crashes when it recomputes a request that has a seed, which it does after a swap.
            "seed": None if self._device == "cpu" else seed,
        }
        own |= {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # these override the model's generation_config.json
        mark = {"cache_salt": f"v{served.seq}"} if self._marks_requests else {}
        if self._has_exact_route:
            return TOKEN_ROUTE, {**token_request(self._model, prompt, own), **mark}
        return _PLAIN_ROUTE, {"model": self._model, "prompt": list(prompt), **own, **mark, "logprobs": 0, "return_token_ids": True}

    def _read(
        self, answer: Mapping[str, Any], sampling: Sampling, before: Version, routers: ModelRouters | None, prompt: int
    ) -> list[Generated]:
        try:
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            if len(choices) != sampling.samples:
                raise EngineError(f"the server returned {len(choices)} completions instead of {sampling.samples}.")
            made = [self._completion(choice, before, routers, prompt) for choice in choices]
            fill_prompts([each.routing for each in made], prompt, [each.spans[0].version if each.spans else None for each in made])
            return made
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"the answer of the server at {self._routes.url} cannot be read: {error!r}.") from error

    def _completion(self, choice: Mapping[str, Any], before: Version, routers: ModelRouters | None, prompt: int) -> Generated:
        drawn = read_choice(choice)
        if drawn.spans is None:
            made = [GeneratedSpan(0, len(drawn.tokens), self._oldest_since(before))] if drawn.tokens else []
        else:
            made = [GeneratedSpan(span.start, span.end, self._labelled(span.label)) for span in drawn.spans]
        routing = self._recorded(drawn, routers, prompt + len(drawn.tokens)) if self._routing else None
        return Generated(np.array(drawn.tokens, np.int32), np.array(drawn.logprobs, np.float32), tuple(made), drawn.finished, routing)

    def _captures_experts(self) -> bool:
        """Return whether the workers record experts, as those of vLLM's CPU build do for this client. Raises `RouteFailed`."""
        if not (self._routing and self._device == "cpu" and self._has_exact_route):
            return False
        (why, *_) = [answer["why_not"] for answer in self._routes.call_workers("deltawire_capture_experts")]
        return why is None

    def _recorded(self, drawn: LabelledTokens, routers: ModelRouters | None, tokens: int) -> RecordedExperts | None:
        """Return the experts that the server recorded. If they are missing or cannot be used, return None, and say why in an event."""
        why = None
        if routers is None:
            why = "the chain's model has no routers, or their config is not known."
        elif drawn.experts is None:
            why = "the vLLM server does not send routed experts. Start it with --enable-return-routed-experts."
        else:
            try:
                read = read_captured_experts if isinstance(drawn.experts, dict) else read_vllm_experts
                return read(drawn.experts, routers, tokens)
            except EngineError as error:
                why = str(error)
        if why != self._problem_of_routing:
            emit(self._on_event, "routing-unusable", reason=why)
        self._problem_of_routing = why
        return None

    def _oldest_since(self, before: Version) -> Version:
        now = self._served()
        return min(before, now, key=lambda version: version.seq)

    def _labelled(self, label: str) -> Version:
        """Return the version with this label. Raises `EngineUnavailable` if the label is not that of a version."""
        try:
            return self._log.version(int(label))
        except (ValueError, VersionUnknown) as error:
            raise EngineUnavailable(f"tokens were made by weights with the label {label!r}, which is not a version.") from error
        except DeltawireError as error:
            raise EngineUnavailable(f"version {label} cannot be looked up: {error}") from error


def _content(route: str, pending: PendingAnswer) -> Any:
    try:
        answer = pending.answer()
        if answer.status != 200:
            raise RouteFailed(route, answer.status, answer.text)
        return json.loads(answer.content)
    except (NoAnswer, ValueError) as error:
        raise EngineUnavailable(f"the server did not answer {route}: {error}.") from error
