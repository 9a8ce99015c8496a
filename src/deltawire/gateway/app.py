"""The routes of a gateway, and the checks that every request passes: its host, its key, its size."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from ..dashboard.host_names import accepts_host
from ..errors import (
    EngineLost,
    GatewayBusy,
    GatewayError,
    HostRefused,
    InteractionUnknown,
    KeyRefused,
    MethodUnknown,
    OriginRefused,
    RequestMalformed,
)
from ..events import OnEvent, emit
from ..format.feedback import Feedback
from .engine_client import NoAnswer
from .engine_pool import EnginePool
from .feedback import FeedbackIntake, derived_id, read_feedback
from .http.api_keys import ApiKeys, Caller
from .http.bodies import (
    CallerGone,
    Headers,
    Receive,
    Scope,
    Send,
    discard_body,
    error_body,
    headers_of,
    parse_object,
    read_body,
    send_bytes,
    send_json,
    until_gone,
)
from .http.memory import MemoryBudget, Reservation
from .http.no_route import unknown_route
from .http.origins import Origins
from .http.requests import ROUTES, read_request
from .http.stoppable import Stoppable
from .metric_names import MetricNames
from .options import GatewayOptions
from .otlp import EvaluationResult, read_results, response_body
from .proxy import Proxy

_MOST_FEEDBACK_BODY = 64 << 10
_MOST_OTLP_BODY = 4 << 20
_LABELS = {"true": True, "pass": True, "yes": True, "false": False, "fail": False, "no": False}

_MODELS_SECONDS = 5.0
"""People look at the list of models to see whether anything answers, so it does not wait as long as a request."""

_RESULTS_AT_ONCE = 256
"""The results of a request that wait for the store together. Others' feedback and requests come between these and the next ones."""

_RESULT_BYTES = 4 << 10
"""The memory for an evaluation result and the task that stores it."""

Handler = Callable[[Scope, Headers, Caller, Reservation, Receive, Send], Awaitable[None]]


class Endpoint:
    """One route. It checks a request, calls a handler, and turns errors into answers.

    Parameters
    ----------
    gateway
        The gateway.
    handler
        Answers requests.
    method
        The method that the route takes: GET, and then also HEAD, or POST. None takes all.
    is_open
        Whether the route needs no API key.
    is_feedback
        Whether callers who may send only feedback may use it.
    """

    def __init__(
        self, gateway: GatewayApp, handler: Handler, *, method: str | None, is_open: bool = False, is_feedback: bool = False
    ) -> None:
        self._gateway, self._handler, self._is_open, self._is_feedback = gateway, handler, is_open, is_feedback
        self._methods = {"GET": ("GET", "HEAD"), "POST": ("POST",), None: ()}[method]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = headers_of(scope)
        has_begun, has_body = False, True

        async def receiving() -> Any:
            nonlocal has_body
            message = await receive()
            has_body = bool(message.get("more_body"))
            return message

        async def sending(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            if self._methods and scope["method"] not in self._methods:
                raise MethodUnknown(f"{scope['path']} takes {self._methods[0]} and not {scope['method'][:20]}.")
            if not accepts_host(headers.get("host"), self._gateway.names):
                raise HostRefused("this gateway does not have that name.")
            if scope["method"] == "POST" and headers.get("origin", "") not in ("", *self._gateway.origins):
                raise OriginRefused(f"pages of {headers['origin'][:80]!r} may not send requests to this gateway.")
            caller = Caller() if self._is_open else self._gateway.keys.caller(headers)
            if caller.only_feedback and not self._is_feedback:
                raise KeyRefused("this API key is only for feedback.", hint="Use a key without the word `feedback` in the --keys file.")
            with self._gateway.counted(caller) as memory:
                await self._handler(scope, headers, caller, memory, receiving, sending)
        except CallerGone:
            return
        except GatewayError as error:
            if has_begun:
                raise
            emit(self._gateway.on_event, "request-refused", route=str(scope["path"])[:64], status=error.status, error=type(error).__name__)
            if has_body:
                await discard_body(receive)
            more = {"www-authenticate": "Bearer"} if error.status == 401 else {"retry-after": "1"} if error.retryable else {}
            if isinstance(error, MethodUnknown):
                more = {"allow": ", ".join(self._methods)}
            await send_json(send, error_body(error), status=error.status, headers={**more, "connection": "close"})


class GatewayApp:
    """The routes of a gateway.

    Parameters
    ----------
    options
        How the gateway serves.
    session
        The session of the gateway.
    pool
        The engines.
    proxy
        Answers requests.
    feedback
        Stores feedback.
    names
        Notices feedback for metrics that are not declared.
    keys
        The API keys.
    memory
        The memory that requests may take together.
    metrics
        Returns the metrics for Prometheus as text, or None.
    on_event
        Called with "request-refused".
    """

    def __init__(
        self,
        options: GatewayOptions,
        session: str,
        pool: EnginePool,
        proxy: Proxy,
        feedback: FeedbackIntake,
        names: MetricNames,
        keys: ApiKeys,
        *,
        memory: MemoryBudget,
        metrics: Callable[[], bytes] | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._options, self._session, self._pool, self._proxy, self._feedback = options, session, pool, proxy, feedback
        self.keys, self._metric_names = keys, names
        self.names = {"localhost", *(name.lower() for name in options.names)}
        self.origins = options.origins
        self.on_event = on_event
        self._memory, self._metrics = memory, metrics
        self._requests = 0
        self._requests_of: Counter[str | None] = Counter()
        self._routes = ""

    def build(self) -> Any:
        """Return the application for a server."""
        from fastapi import FastAPI
        from starlette.routing import Route

        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        takes = {path: Endpoint(self, self._answer, method="POST") for path in ROUTES}
        takes["/v1/models"] = Endpoint(self, self._models, method="GET")
        takes["/feedback"] = Endpoint(self, self._take_feedback, method="POST", is_feedback=True)
        takes |= {path: Endpoint(self, self._take_otlp, method="POST", is_feedback=True) for path in ("/v1/logs", "/v1/traces")}
        takes["/healthz"] = Endpoint(self, self._health, method="GET", is_open=True)
        takes["/metrics"] = Endpoint(self, self._tell_metrics, method="GET", is_open=True)
        app.router.routes.extend(Route(path, endpoint) for path, endpoint in takes.items())
        self._routes = ", ".join(takes)
        app.router.default = Endpoint(self, self._refuse_route, method=None, is_open=True)
        return Origins(app, self._options.origins, self.names) if self._options.origins else app

    @contextlib.contextmanager
    def counted(self, caller: Caller) -> Iterator[Reservation]:
        """Count a request inside the context, and yield the reservation of its memory.

        Raises `GatewayBusy` if there are too many requests, of all callers or of this one. Without API keys all requests are of one caller,
        who may use the whole gateway.
        """
        if self._requests >= self._options.most_requests:
            raise GatewayBusy(f"the gateway has {self._requests:,} requests at once.")
        if caller.name is not None and self._requests_of[caller.name] >= self._options.requests_per_caller:
            raise GatewayBusy(f"the caller {caller.name} has {self._requests_of[caller.name]:,} requests at once.")
        self._requests += 1
        self._requests_of[caller.name] += 1
        try:
            with self._memory.reservation(caller.name) as reserved:
                yield reserved
        finally:
            self._requests -= 1
            self._requests_of[caller.name] -= 1

    async def _answer(self, scope: Scope, headers: Headers, caller: Caller, memory: Reservation, receive: Receive, send: Send) -> None:
        raw = await read_body(receive, headers, self._options.most_bytes, memory=memory)
        body = parse_object(raw, memory)
        asked = read_request(ROUTES[scope["path"]], body, headers, caller, consent=self._options.consent, memory=memory)
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            with Stoppable() as answering:
                gone.add_done_callback(lambda _: answering.stop(CallerGone()))
                await self._proxy.answer(asked, raw, headers, send)
        finally:
            gone.cancel()

    async def _take_feedback(
        self, scope: Scope, headers: Headers, caller: Caller, memory: Reservation, receive: Receive, send: Send
    ) -> None:
        body = parse_object(await read_body(receive, headers, _MOST_FEEDBACK_BODY, memory=memory), memory)
        if not isinstance(is_dry := body.get("dryrun") or False, bool):
            raise RequestMalformed("dryrun must be true or false.")
        with _saying_why_nothing_is_known(caller):
            feedback = await self._feedback.check(read_feedback(body, caller, key=headers.get("idempotency-key")))
        more = {"declared": False} if self._metric_names.is_undeclared(feedback.metric) else {}
        if not is_dry:
            await self._feedback.store(feedback, memory, sender=caller.name)
        await send_json(send, {"feedback_id": feedback.id, **more, **({"dryrun": True} if is_dry else {})})

    async def _take_otlp(self, scope: Scope, headers: Headers, caller: Caller, memory: Reservation, receive: Receive, send: Send) -> None:
        """Take evaluation results of an OpenTelemetry exporter. The answer counts unusable ones, as exporters expect."""
        kind = headers.get("content-type", "application/x-protobuf")
        is_traces = scope["path"] == "/v1/traces"
        body = await read_body(receive, headers, _MOST_OTLP_BODY, memory=memory)
        results = read_results(body, kind, is_traces=is_traces, memory=memory)
        memory.add(_RESULT_BYTES * len(results))
        rejected, why = 0, ""
        for start in range(0, len(results), _RESULTS_AT_ONCE):
            outcomes = [await self._checked(result, caller) for result in results[start : start + _RESULTS_AT_ONCE]]
            good = [each for each in outcomes if isinstance(each, Feedback)]
            refused = [each for each in outcomes if not isinstance(each, Feedback)]
            storing = (self._feedback.store(each, memory, sender=caller.name) for each in good)
            for outcome in (*refused, *await asyncio.gather(*storing, return_exceptions=True)):
                if isinstance(outcome, GatewayError) and outcome.retryable:
                    raise outcome
                if outcome is not None:
                    rejected, why = rejected + 1, f"{type(outcome).__name__}: {outcome}"
            await asyncio.sleep(0)  # other requests come in between
        data = response_body(rejected, why, kind, is_traces=is_traces)
        await send_bytes(send, data, "application/json" if "json" in kind else "application/x-protobuf")

    async def _checked(self, result: EvaluationResult, caller: Caller) -> Feedback | GatewayError:
        """Return the feedback that a result is, or why it is none."""
        try:
            with _saying_why_nothing_is_known(caller):
                feedback = await self._feedback.check(feedback_of(result, caller))
            self._metric_names.is_undeclared(feedback.metric)
        except GatewayError as error:
            return error
        return feedback

    async def _models(self, scope: Scope, headers: Headers, caller: Caller, memory: Reservation, receive: Receive, send: Send) -> None:
        for _ in range(3):
            engine = await self._pool.take(self._pool.main, most=_MODELS_SECONDS)
            url = engine.address.url + "/v1/models"
            try:
                found = await self._pool.get(url, most=self._options.most_bytes, memory=memory, seconds=_MODELS_SECONDS)
            except (NoAnswer, EngineLost) as error:
                self._pool.lost(engine, error)
                continue
            finally:
                self._pool.give_back(engine)
            await send_bytes(send, found.data, found.kind, status=found.status)
            return
        raise GatewayBusy("the engines were lost while they answered.")

    async def _refuse_route(
        self, scope: Scope, headers: Headers, caller: Caller, memory: Reservation, receive: Receive, send: Send
    ) -> None:
        raise unknown_route(str(scope["path"]), self._routes)

    async def _health(self, scope: Scope, headers: Headers, caller: Caller, memory: Reservation, receive: Receive, send: Send) -> None:
        up = self._pool.ready
        await send_json(send, {"session": self._session, "engines": len(self._pool.engines), "up": up}, status=200 if up else 503)

    async def _tell_metrics(
        self, scope: Scope, headers: Headers, caller: Caller, memory: Reservation, receive: Receive, send: Send
    ) -> None:
        if self._metrics is None:
            await send_json(send, {"error": "metrics need the package prometheus_client"}, status=404)
        else:
            await send_bytes(send, self._metrics(), "text/plain; version=0.0.4; charset=utf-8")


@contextlib.contextmanager
def _saying_why_nothing_is_known(caller: Caller) -> Iterator[None]:
    """Give `InteractionUnknown` the reason that holds for every answer, if the caller's keys have no right to any."""
    try:
        yield
    except InteractionUnknown as error:
        if not caller.can_rate_nothing:
            raise
        raise InteractionUnknown(
            f"{error.message} No answer belongs to the caller {caller.name}, because its keys are only for feedback.",
            hint=f"Give the key that asks for the answers a line with the name {caller.name} in the gateway's --keys file, or add `all`.",
        ) from None


def feedback_of(result: EvaluationResult, caller: Caller) -> Feedback:
    """Return an evaluation result as feedback. The same result gives the same id, so one that is exported twice counts once.

    Raises `RequestMalformed` if it names no answer, or has no value.
    """
    told = result.attributes
    value = told.get("gen_ai.evaluation.score.value")
    if value is None:
        label = told.get("gen_ai.evaluation.score.label")
        value = _LABELS.get(label.lower(), label) if isinstance(label, str) else None
    target = {"inference_id": told.get("gen_ai.response.id"), "episode_id": told.get("deltawire.episode.id")}
    if target["inference_id"] is None and target["episode_id"] is None:
        target["episode_id"] = told.get("gen_ai.conversation.id")
    name = told.get("gen_ai.evaluation.name")
    parts = (str(target), str(name), repr(value), str(result.time), result.span, caller.name or "")
    body = {**target, "metric_name": name, "value": value, "revision": told.get("deltawire.revision")}
    return read_feedback({**body, "feedback_id": derived_id("otlp", *parts)}, caller)
