"""The error about a route that the gateway does not have."""

from __future__ import annotations

from ...errors import RouteUnknown


def unknown_route(path: str, routes: str) -> RouteUnknown:
    """Return the error, with the remedy for this path.

    Parameters
    ----------
    path
        The path of the request.
    routes
        The routes that there are.
    """
    message = f"this gateway has no route {path[:80]!r}; it has {routes}."
    if path.rstrip("/").endswith("/feedback"):
        return RouteUnknown(message, hint="Send feedback to /feedback, without /v1.")
    if path.startswith("/v1/") and not path.startswith("/v1/v1/"):
        return RouteUnknown(message, hint="Use one of these routes.")
    return RouteUnknown(message)
