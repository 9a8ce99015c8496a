"""Fetches the routed experts that workers of vLLM's CPU build record (`expert_capture.py`), and adds them to the server's answers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from .routes import VllmRoutes


class WorkerExperts:
    """The experts of some requests.

    Parameters
    ----------
    routes
        The server.
    bodies
        The route and the body of each request. Each body gets a `request_id` by which the workers know it.
    """

    def __init__(self, routes: VllmRoutes, bodies: Sequence[tuple[str, dict[str, Any]]]) -> None:
        self._routes = routes
        self._names = [f"deltawire-{secrets.token_hex(16)}" for _ in bodies]
        for name, (_, body) in zip(self._names, bodies, strict=True):
            body["request_id"] = name

    def add_to(self, answers: Sequence[Any]) -> None:
        """Fetch the experts, and put them where a server with `--enable-return-routed-experts` has them.

        Parameters
        ----------
        answers
            The answers to the requests. Anything in them that is not as expected is left as it is.
        """
        choices: dict[str, dict[str, Any]] = {}
        for name, answer in zip(self._names, answers, strict=True):
            for choice in answer.get("choices", ()) if isinstance(answer, dict) else ():
                if isinstance(choice, dict) and isinstance(choice.get("index"), int):
                    choices[f"{choice['index']}/{name}"] = choice
        (told, *_) = self._routes.call_workers("deltawire_take_experts", list(choices))
        for name, experts in told.items() if isinstance(told, dict) else ():
            if name in choices:
                choices[name]["routed_experts"] = experts
