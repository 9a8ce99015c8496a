"""Lets pages of named origins use the gateway from a browser (CORS). Without such an origin, no answer has a header of CORS.

Browsers hide answers from pages of other origins. An answer says that its page may read it only for exactly the origins that were named,
and never lets a browser send cookies or other credentials on its own: callers have API keys.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from ...dashboard.host_names import accepts_host
from .bodies import Headers, Receive, Scope, Send, headers_of, send_start
from .requests import CHANNEL_HEADER, EPISODE_HEADER, ID_HEADER, VERSION_HEADER

_ORIGIN = re.compile(r"https?://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::[1-9][0-9]{0,4})?")
_NAMES = re.compile(r"[a-z0-9-]{1,64}(?:, ?[a-z0-9-]{1,64}){0,63}")
_EXPOSED = ", ".join((ID_HEADER, VERSION_HEADER, CHANNEL_HEADER, EPISODE_HEADER, "retry-after"))
_SECONDS = 600
"""Browsers may remember for this long that an origin is allowed."""


def check_origin(text: str) -> str:
    """Return an origin as browsers send it. Raises `ValueError` for anything else, such as a pattern or an address with a path."""
    lower = text.lower()
    if not _ORIGIN.fullmatch(lower) or re.fullmatch(r"http:.*:80|https:.*:443", lower):  # browsers leave these ports out
        raise ValueError(f"{text!r} is not an origin")
    return lower


class Origins:
    """An application for pages of some origins. It answers the requests by which browsers ask whether they may send another one.

    Parameters
    ----------
    app
        The application.
    origins
        The origins whose pages may use it.
    names
        The names of the server, in lower case.
    """

    def __init__(self, app: Any, origins: Collection[str], names: Collection[str]) -> None:
        self._app, self._origins, self._names = app, frozenset(origins), names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = headers_of(scope)
        own = {"vary": "origin"}  # a cache must not give the answer for one origin to another
        if headers.get("origin") in self._origins:
            own |= {"access-control-allow-origin": headers["origin"], "access-control-expose-headers": _EXPOSED}
            if self._asks_first(scope, headers):
                await send_start(send, 204, {**own, **_permission(headers.get("access-control-request-headers", ""))})
                await send({"type": "http.response.body", "body": b""})
                return
        pairs = [(name.encode(), value.encode()) for name, value in own.items()]

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *pairs]}
            await send(message)

        await self._app(scope, receive, sending)

    def _asks_first(self, scope: Scope, headers: Headers) -> bool:
        """Tell whether a browser asks if it may send another request. It does so without a key."""
        is_question = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        return is_question and accepts_host(headers.get("host"), self._names)


def _permission(asked: str) -> dict[str, str]:
    """Say what a page may send: the methods of the gateway, and the headers that it asks for, because clients have headers of their own."""
    permission = {"access-control-allow-methods": "GET, POST", "access-control-max-age": str(_SECONDS)}
    if _NAMES.fullmatch(asked.lower()):
        permission["access-control-allow-headers"] = asked
    return permission
