"""The routed experts that an engine recorded, in the form in which a result holds them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptRollouts
from ..events import OnEvent, emit
from ..format.rollouts import Completion, RolloutLimits, sequences_of
from ..format.routing import RecordedExperts, Routing

_MOST_BYTES = RolloutLimits().file_bytes * 3 // 4
"""The tokens need room in the file, too."""


def join_routing(
    prompts: Sequence[NDArray[np.int32]],
    completions: Sequence[Completion],
    recorded: Sequence[RecordedExperts | None],
    *,
    on_event: OnEvent | None = None,
) -> Routing | None:
    """Return the routing of a result, or None if nothing was recorded, or if it cannot be used. It never fails a task.

    Events: "routing-broken" if rows were dropped, and "routing-unusable" if all were.

    Parameters
    ----------
    prompts
        The token ids of each prompt.
    completions
        The completions of the result.
    recorded
        The experts that the engine recorded for each completion.
    on_event
        Called with every event.
    """
    layouts = {each.layout for each in recorded if each is not None}
    if not layouts:
        return None
    try:
        if len(layouts) > 1:
            raise ValueError("completions of one task have routers of different shapes")
        experts = [None if each is None else each.experts for each in recorded]
        routing = Routing.encode(layouts.pop(), sequences_of(prompts, completions), experts)
        if routing.nbytes > _MOST_BYTES:
            raise ValueError(f"they take {routing.nbytes:,} bytes; {_MOST_BYTES:,} are allowed")
    except (ValueError, CorruptRollouts) as error:
        emit(on_event, "routing-unusable", reason=str(error))
        return None
    if routing.broken:
        emit(on_event, "routing-broken", rows=routing.broken, of=routing.ids // routing.layout.top_k)
    return routing
