"""Walk a route to a version, and try another route when a hop fails.

Every reader and every resuming publisher works like this: it finds a route, takes its hops one after the other, and finds another route
if one of them fails. `walk_route` is that loop. Its callers say how to find a route, and how to take the hops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from ...errors import ChainError, CheckpointError, DeltaError, DeltawireError, StateError, TensorError
from .restore import Hop

_Result = TypeVar("_Result")


class HopFailed(Exception):
    """One hop of a route could not be taken. `error` says why."""

    def __init__(self, hop: Hop, error: DeltawireError) -> None:
        super().__init__(f"{hop.source} to {hop.target.describe()}: {error}")
        self.hop = hop
        self.error = error


class AvoidsHops(Protocol):
    """Finds routes that do not use the hops that failed (`deltawire.chain.routes.remaining_routes.Routes`)."""

    def avoid(self, failure: HopFailed) -> None:
        """Leave this hop out of all later routes. Raises the failure's error if the hop was already ruled out."""


def walk_route(
    routes: AvoidsHops,
    find: Callable[[], Sequence[Hop]],
    take: Callable[[Sequence[Hop]], _Result],
    *,
    drop_base: Callable[[HopFailed], None] | None = None,
    base_errors: tuple[type[DeltawireError], ...] = (StateError,),
) -> _Result:
    """Find a route and take its hops, until one route succeeds. Return the result of `take`.

    After a failed hop, either the hop or the base is ruled out, and `find` is called again. The base is ruled out if `drop_base` is given,
    the route began at the caller's own state (not at a full checkpoint), the hop is not a skip, and the error is one of `base_errors`. In
    all other cases the hop is ruled out. Skips are ruled out first because a writer may have composed them wrongly, and another route
    costs less than another base.

    Parameters
    ----------
    routes
        Learns which hops to avoid. Its `avoid` ends the loop by raising an error if the same hop fails twice.
    find
        Returns the next route. Raises an error if none is left.
    take
        Takes all hops of a route. Raises `HopFailed` for a hop that fails; use `taking` to turn errors into `HopFailed`. Every other
        exception ends the walk.
    drop_base
        Called if the caller's own state is not what its commit says. After this call, `find` must not start from that state again. None if
        the caller has no state of its own.
    base_errors
        The errors that show that the base is wrong. The default suits callers that compare the digest of the base before they apply a
        delta. Callers that do not must add the errors that a wrong base can cause later, such as `DeltaError` for a wrong result.
    """
    while True:
        hops = find()
        try:
            return take(hops)
        except HopFailed as failure:
            began_at_own_state = bool(hops) and hops[0].base is not None
            if drop_base is not None and began_at_own_state and failure.hop.source != "skip" and isinstance(failure.error, base_errors):
                drop_base(failure)
            else:
                routes.avoid(failure)


@contextmanager
def taking(hop: Hop) -> Iterator[None]:
    """Turn every error that says something about a hop or its base into `HopFailed`. Errors of the store pass through unchanged."""
    try:
        yield
    except (ChainError, DeltaError, StateError, TensorError, CheckpointError) as error:
        raise HopFailed(hop, error) from error
