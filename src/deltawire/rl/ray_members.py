"""Members as actors on a Ray cluster that is there already (the extra `ray` of deltawire). Every node needs deltawire installed.

A member lives in its actor's process and goes when that goes. The cluster only places it: weights, leases and results all go through the
store, which every node must reach with credentials of its own, or with those that are passed in `environment`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from ..errors import DeltawireError, UnusableReward
from ..fleet.supervision import Lasting
from .member import MemberOptions, serve


class RayCluster:
    """The cluster at `address` (None: the one that this machine belongs to). `ImportError` where ray is not installed.

    `cpus`, `gpus` and `resources` are what one member takes of a node. Members are spread over the nodes.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        resources: Mapping[str, float] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise ImportError("Ray is not installed. Run `pip install ray`") from None
        self._ray: Any = ray
        self._owns_connection = not ray.is_initialized()
        if self._owns_connection:
            try:
                ray.init(address=address or "auto", log_to_driver=True)
            except ConnectionError as error:
                raise ConnectionError(
                    f"no Ray cluster was found ({error}). Start one with `ray start --head`, or give its address"
                ) from None
        self._actor = ray.remote(
            num_cpus=cpus,
            num_gpus=gpus,
            resources=dict(resources or {}),
            max_restarts=0,  # who restarts is decided in one place, `Supervisor`
            max_concurrency=2,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": dict(environment or {})},
        )(_MemberActor)

    def start(self, options: MemberOptions) -> RayMember:
        """A member somewhere on the cluster; it waits until there is a place for it."""
        return RayMember(self._ray, self._actor.remote(options.to_json()))

    def close(self) -> None:
        """Let go of the cluster. Members whose `RayMember` is still there end."""
        if self._owns_connection:
            self._ray.shutdown()


class RayMember:
    """A member on the cluster; see `supervision.Running`."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor
        self._outcome = actor.run.remote()

    def ending(self) -> str | None:
        done, _ = self._ray.wait([self._outcome], timeout=0)
        if not done:
            return None
        try:
            ending, is_lasting = self._ray.get(self._outcome)
            return Lasting(ending) if is_lasting else str(ending)
        except self._ray.exceptions.RayError as error:  # its process or node is gone, or it was killed
            return f"{type(error).__name__}: {error}".split("\n")[0]

    def leave(self) -> None:
        self._actor.leave.remote()

    def kill(self) -> None:
        self._ray.kill(self._actor)

    def node(self) -> str:
        """The id of the node that it runs on."""
        return str(self._ray.get(self._actor.node.remote()))


class _MemberActor:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = MemberOptions.from_json(options)
        self._stop = threading.Event()

    def run(self) -> tuple[str, bool]:
        """Run the member from beginning to end. Return "" if it left as it should, else why not; and whether that does not heal."""
        try:
            serve(self._options, stop=self._stop)
        except DeltawireError as error:
            return f"{type(error).__name__}: {error}", isinstance(error, UnusableReward)
        return "", False

    def leave(self) -> None:
        self._stop.set()

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())
