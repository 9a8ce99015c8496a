"""Publish from TRL's `AsyncGRPOTrainer`. Weights go to a chain in an object store, and from there to any number of vLLM servers.

>>> AsyncGRPOTrainer(..., weight_transfer=DeltaWireTransfer("s3://bucket/run", server="http://10.0.0.7:8000"))

Run `deltawire sidecar` next to each server. It pauses the server for each swap. Trainer and servers share only the bucket.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..chain.log import ChainLog
from ..chain.records.reports import LOST, QUARANTINED, REFUSED, SERVING, read_reports
from ..chain.version import Version
from ..engines.vllm.driver.routes import EngineUnreachable, RouteFailed, VllmRoutes
from ..errors import EngineError
from ..events import OnEvent, emit
from ..publish import Publisher, WriterOptions
from ..publish.attachments.read_files import Attachments
from ..quantise import Recipe
from ..store import Store, open_store
from ..telemetry.trackers import join_run
from ..tensors.checkpoint_layout import CheckpointLayout

if TYPE_CHECKING:
    import torch

_POLL_SECONDS = 0.05
"""How often a sync asks whether its version is served."""


class DeltaWireTransfer:
    """Publishes the weights at every sync of TRL. Pass it as `AsyncGRPOTrainer(weight_transfer=…)`.

    A sync returns when its version is served. It waits because TRL tags samples with the number of syncs so far: without waiting, samples
    would be tagged with newer versions than those that made them. `deltawire.trainers.trl_samples` labels samples exactly.

    The step of a version counts syncs, from 0. If the chain has versions already, it continues after the step of the newest.

    Parameters
    ----------
    url
        The location of the chain: a URL, a directory, or an open `Store`.
    server
        The address of the vLLM server that must serve a version before a sync returns. None: see `engines`.
    engines
        Without `server`, a sync returns when this many engines have reported in the store that they serve its version. With 0, it returns
        as soon as the version is published.
    dtype
        The type that the engines serve. For example, it is bfloat16 for a trainer in float32. None: nothing is cast.
    quantise
        The recipe by which weights are quantised before they are published, such as "fp8-block", or a `Recipe`. `dtype` is
        the type of the other weights then, bfloat16 by default.
    timeout
        The longest time in seconds that a sync waits, before it raises `EngineError`.
    model
        The model that TRL trains. Pass it for a mixture-of-experts model: TRL sends the names of the live model, in which transformers has
        fused the experts, but vLLM loads the names of checkpoints.
    run
        The name of a new run, or the run that must be at `url` (else `RunMismatch`).
    attachments
        Further files of each version: a directory, or names with bytes or paths. Pass the directory of the model, or its config.json
        and tokenizer files.
    tokenizer
        A tokenizer whose files are published with the model.
    refuse_nonfinite, resume_from_seq, starts_full, options, on_event
        As for `Publisher`.
    """

    def __init__(
        self,
        url: str | Path | Store,
        *,
        server: str | None = None,
        engines: int = 1,
        dtype: torch.dtype | None = None,
        quantise: str | Recipe | None = None,
        timeout: float = 600.0,
        model: torch.nn.Module | None = None,
        run: str | None = None,
        attachments: Attachments | None = None,
        tokenizer: Any = None,
        refuse_nonfinite: bool = False,
        resume_from_seq: int | None = None,
        starts_full: bool = False,
        options: WriterOptions | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.versions: list[Version] = []
        """The published versions, in order. TRL's model version n is the n-th of them, counted from 1."""
        self._url = url
        self._server = VllmRoutes(server) if server else None
        self._engines = engines
        self._dtype = dtype
        self._quantise = quantise
        self._timeout = timeout
        self._layout = None if model is None else CheckpointLayout(model)
        self._on_event = on_event
        self._options = options or WriterOptions()
        self._publisher_arguments: dict[str, Any] = {
            "run": run,
            "attachments": attachments,
            "tokenizer": tokenizer,
            "refuse_nonfinite": refuse_nonfinite,
            "resume_from_seq": resume_from_seq,
            "starts_full": starts_full,
        }
        self._store: Store | None = None
        self._publisher: Publisher | None = None
        self._first_step = 0

    @property
    def publisher(self) -> Publisher:
        """The publisher, which is open while TRL trains. Raises `EngineError` before and after."""
        if self._publisher is None:
            raise EngineError("init_weight_transfer was not called.")
        return self._publisher

    @property
    def store(self) -> Store:
        """The store of the chain. Raises `EngineError` as `publisher` does."""
        if self._store is None:
            raise EngineError("init_weight_transfer was not called.")
        return self._store

    def init_weight_transfer(self) -> None:
        """Take the run over. TRL calls it before the first sync."""
        if self._publisher is None:
            join_run(self._on_event)  # TRL's own trackers have begun their runs before
            self._store = open_store(self._url, options=self._options.store, on_event=self._on_event)
            self._publisher = Publisher(
                self._store,
                dtype=self._dtype,
                quantise=self._quantise,
                options=self._options,
                on_event=self._on_event,
                **self._publisher_arguments,
            )
            newest = self._publisher.version
            self._first_step = 0 if newest is None or newest.step is None else newest.step + 1

    def pause(self) -> None:
        """Do nothing. Servers generate while weights are encoded and uploaded; the sidecar pauses its server only for the swap."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish the weights, and wait until they are served.

        Parameters
        ----------
        iterator
            Names and tensors. TRL passes them.
        """
        publisher = self.publisher
        state = {name: self._on_wire(tensor) for name, tensor in iterator}
        if self._layout is not None:
            state = self._layout.convert(state)
        version = publisher.publish(state, step=self._first_step + len(self.versions))
        assert isinstance(version, Version)
        self.versions.append(version)
        self._wait(version)

    def resume(self) -> None:
        """Do nothing, as in `pause`."""

    def destroy(self) -> None:
        """Close the publisher and the store. TRL calls it at the end."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        if self._server is not None:
            self._server.close()
        if self._store is not None and self._store is not self._url:
            self._store.close()
        self._store = None

    def _on_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        is_cast = self._quantise is None and self._dtype is not None and tensor.is_floating_point()  # master weights keep their type
        return tensor.detach().to(device="cpu", dtype=self._dtype if is_cast else tensor.dtype)

    def _wait(self, version: Version) -> None:
        if self._server is None and not self._engines:
            return
        deadline = time.monotonic() + self._timeout
        reported: set[object] = set()
        while not self._is_served(version, reported):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"no engine serves {version.describe()} after {self._timeout:.0f} s. Check that `deltawire sidecar` is running."
                )
            time.sleep(_POLL_SECONDS)

    def _is_served(self, version: Version, reported: set[object]) -> bool:
        if self._server is not None:
            try:
                return self._server.weight_version() == str(version.seq)
            except (EngineUnreachable, RouteFailed):  # the server is being restarted; the sidecar gives it the weights again
                return False
        assert self._store is not None
        serving = 0
        for report in read_reports(self._store, ChainLog(self._store).run):
            serving += report.state == SERVING and report.seq is not None and report.seq >= version.seq
            if report.state in (QUARANTINED, REFUSED, LOST) and report not in reported:
                reported.add(report)
                emit(self._on_event, "engine-failed", reader=report.reader, state=report.state, seq=report.seq, reason=report.error)
        return serving >= self._engines
