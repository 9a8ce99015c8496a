"""Completions from a vLLM server whose weights follow a chain, driven from this process.

Which version made which token: exact, where the server tells (token_route.py); the sidecar names weights by their place in the chain.
Other servers have only /v1/completions, which tells nothing: then a whole completion is attributed to the oldest version that was served
between sending the request and having its answer, which is conservative, since a budget of staleness counts from the oldest.

Log-probs are those of the distribution that was drawn from, if the server runs with `--logprobs-mode processed_logprobs`. With vLLM's
default they are those of temperature 1 and top_p 1, so a server that says it has that default is refused for any other sampling.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...chain.reader_options import ReaderOptions
from ...chain.version import Version
from ...errors import DeltawireError, EngineError, EngineRefused, EngineUnavailable, VersionUnknown
from ...events import OnEvent
from ...fleet.generation import Generated, GeneratedSpan, Interrupted, Stop, never
from ...format.records.trainer_records import Sampling
from ...store import Store
from ...subscribe.model_files import FollowedFiles
from ..http_session import NoAnswer, PendingAnswer, http_session
from ..prompts import Prompts
from .routes import EngineUnreachable, RouteFailed, VllmRoutes
from .sidecar import Sidecar
from .token_route import TOKEN_ROUTE, read_choice, token_request

_PLAIN = "/v1/completions"
_LOOK = 0.05
_HEALTH = 5.0
_PATIENCE = 3600.0
"""Seconds that the server may take for one request."""


class VllmGenerator:
    """A `deltawire.fleet.generation.Generator` that asks the vLLM server at `url`, and keeps it at the newest version in `store`.

    The server is started as for `deltawire sidecar` (which must not run beside this: there would be two to drive it). Its requests are sent
    one per prompt, all at once, and it batches them.
    """

    def __init__(
        self,
        store: Store,
        url: str,
        mirror: Path | str,
        *,
        options: ReaderOptions | None = None,
        poll: float = 0.5,
        on_event: OnEvent | None = None,
    ) -> None:
        self._log = (options or ReaderOptions()).open_log(store)
        self._routes = VllmRoutes(url)
        self._prompts = FollowedFiles(store, Prompts.of, options=options)
        self._sidecar = Sidecar(url, store, mirror, options=options, on_event=on_event)
        self._poll = poll
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._model: str | None = None
        self._has_exact_route = True
        self._logprobs_mode: str | None = None
        self._device: str | None = None

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Token ids of the rows' prompts, by the tokenizer of the version that the server has."""
        return self._prompts.at(self.version).encode(rows)

    def decode(self, rows: Sequence[Mapping[str, Any]], tokens: Sequence[Sequence[int]]) -> list[Any]:
        """Completions as rewards see them, by the tokenizer of the version that the server has."""
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
        self._meet_server(sampling)
        try:
            answers = self._answers([self._body(prompt, sampling, sampling.seed + number) for number, prompt in enumerate(prompts)], stop)
        except EngineUnreachable as failure:
            raise EngineUnavailable(f"the server was lost: {failure}") from failure
        except RouteFailed as failure:
            if failure.status in (403, 404) and self._has_exact_route:
                self._has_exact_route = False
                return self.generate(prompts, sampling, stop=stop)
            raise EngineUnavailable(str(failure)) from failure
        return [made for answer in answers for made in self._read(answer, sampling, before)]

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._sidecar.close()

    def _drive(self) -> None:
        try:
            self._sidecar.run(poll=self._poll, stop=self._stop)
        except Exception as error:
            self._failure = error

    def _answers(self, bodies: Sequence[tuple[str, dict[str, Any]]], stop: Stop) -> list[Any]:
        """Send all requests at once; the server batches them. Returns their answers in order. Whatever is raised gives up all of them."""
        with http_session(self._routes.url) as session:
            requests = [(route, session.begin("POST", route, body, timeout=_PATIENCE)) for route, body in bodies]
            looked = time.monotonic()
            while not all(pending.wait(_LOOK) for _, pending in requests):
                if stop():
                    raise Interrupted
                if time.monotonic() - looked > _HEALTH:  # a server whose engine is dead may keep its clients waiting for ever
                    self._routes.check_alive()
                    looked = time.monotonic()
            return [_content(route, pending) for route, pending in requests]

    def _served(self) -> Version:
        served = self._sidecar.served
        if served is None:
            raise self._failure or EngineUnavailable(f"the server at {self._routes.url} has no version of the chain yet.")
        return served

    def _meet_server(self, sampling: Sampling) -> None:
        """Learn what the server calls its model, and whether its log-probs are those that were drawn from."""
        try:
            if self._model is None:
                self._model = self._routes.model()
                self._logprobs_mode, self._device = self._routes.settings()
        except (EngineUnreachable, RouteFailed) as error:
            raise EngineUnavailable(str(error)) from error
        if self._logprobs_mode == "raw_logprobs" and (sampling.temperature, sampling.top_p) != (1.0, 1.0):
            raise EngineRefused(
                f"the vLLM server at {self._routes.url} reports log-probs without temperature and top_p. "
                "Start it with --logprobs-mode processed_logprobs."
            )

    def _body(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> tuple[str, dict[str, Any]]:
        own = {
            "n": sampling.samples,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # On a CPU the engine dies of requests with a seed that it has to compute anew, as it does after a swap (vLLM 0.32).
            "seed": None if self._device == "cpu" else seed,
        }
        own |= {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # a model's generation_config.json may say otherwise
        if self._has_exact_route:
            return TOKEN_ROUTE, token_request(self._model, prompt, own)
        return _PLAIN, {"model": self._model, "prompt": list(prompt), **own, "logprobs": 0, "return_token_ids": True}

    def _read(self, answer: Mapping[str, Any], sampling: Sampling, before: Version) -> list[Generated]:
        try:
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            if len(choices) != sampling.samples:
                raise EngineError(f"the server made {len(choices)} completions of {sampling.samples}.")
            return [self._completion(choice, before) for choice in choices]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"the answer of the server at {self._routes.url} cannot be read: {error!r}.") from error

    def _completion(self, choice: Mapping[str, Any], before: Version) -> Generated:
        drawn = read_choice(choice)
        if drawn.spans is None:
            made = [GeneratedSpan(0, len(drawn.tokens), self._oldest_since(before))] if drawn.tokens else []
        else:
            made = [GeneratedSpan(span.start, span.end, self._named(span.label)) for span in drawn.spans]
        return Generated(np.array(drawn.tokens, np.int32), np.array(drawn.logprobs, np.float32), tuple(made), drawn.finished)

    def _oldest_since(self, before: Version) -> Version:
        now = self._served()
        return min(before, now, key=lambda version: version.seq)

    def _named(self, label: str) -> Version:
        """The version that the sidecar gave this label to; `EngineUnavailable` if nobody knows what made the tokens."""
        try:
            return self._log.version(int(label))
        except (ValueError, VersionUnknown) as error:
            raise EngineUnavailable(f"tokens were made by weights that are called {label!r}.") from error
        except DeltawireError as error:
            raise EngineUnavailable(f"it cannot be found out what version {label} is: {error}") from error


def _content(route: str, pending: PendingAnswer) -> Any:
    try:
        answer = pending.answer()
        if answer.status != 200:
            raise RouteFailed(route, answer.status, answer.text)
        return json.loads(answer.content)
    except (NoAnswer, ValueError) as error:
        raise EngineUnavailable(f"the server did not answer {route}: {error}.") from error
