"""Records the experts of a transformers model while it generates."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ...engines.routed_experts import routers_of
from ...errors import UnsupportedRouting
from ...format.routing import RoutingLayout
from .router_replay import Recording, RouterReplay


def layout_of_model(model: Any) -> RoutingLayout | None:
    """Return the routers of a model, or None if it has none, or they are not known."""
    try:
        with RouterReplay(model) as replay:
            return RoutingLayout(replay.experts, replay.top_k, replay.layers)
    except UnsupportedRouting:  # an engine may still know them
        config = getattr(model, "config", None)
        routers = None if config is None else routers_of(config.to_dict(), (name for name, _ in model.named_parameters()))
        return None if routers is None else routers.layout


class RoutingRecorder:
    """Records which experts process the tokens of forward passes. Several threads may run the model: their passes follow each other.

    Raises `UnsupportedRouting` if the model has no routers, or routers that `RouterReplay` does not support.

    Parameters
    ----------
    model
        A model of transformers.
    """

    def __init__(self, model: Any) -> None:
        self._replay = RouterReplay(model)
        self.layout = RoutingLayout(self._replay.experts, self._replay.top_k, self._replay.layers)
        """The routers of the model."""
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[Recording]:
        """Record one forward pass."""
        with self._lock, self._replay.record() as recording:
            yield recording

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._replay.close()
