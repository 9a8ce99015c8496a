"""TRL's `AsyncGRPOTrainer`: weights go to a chain in an object store, and from there to any number of vLLM servers.

>>> AsyncGRPOTrainer(..., weight_transfer=DeltaWireTransfer("s3://bucket/run", server="http://10.0.0.7:8000"))

Beside each server runs `deltawire sidecar`, which does the pausing: trainer and servers share nothing but the bucket.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..chain.log import ChainLog
from ..chain.reports import QUARANTINED, REFUSED, SERVING, read_reports
from ..chain.version import Version
from ..engines.vllm.routes import EngineUnreachable, RouteFailed, VllmRoutes
from ..errors import EngineError
from ..events import OnEvent, emit
from ..publish import Publisher, WriterOptions
from ..publish.attachments.read_files import Attachments
from ..store import Store, open_store
from ..tensors.checkpoint_layout import CheckpointLayout

if TYPE_CHECKING:
    import torch

_LOOK = 0.05


class DeltaWireTransfer:
    """What `AsyncGRPOTrainer(weight_transfer=…)` takes. Publishes the weights at every sync.

    A sync returns when the version is served: by the vLLM server at `server`, if one is named (it asks its `/weight_info`), else by
    `engines` engines, as they report in the store; with `engines=0` as soon as it is published. TRL counts versions by its syncs, and tags
    samples with that number, so without waiting samples are tagged with newer versions than they come from, unless they are labelled
    (`deltawire.trainers.trl_samples`). `EngineError` if it takes longer than `timeout` seconds.

    After a restart of the trainer versions go on where the chain is; their steps count the syncs of this process, from 0.

    The training step of a version counts syncs, from 0, or on from the version that is there when the run is taken over.

    `dtype` is what the servers serve (bf16, for a trainer in fp32). `options` go to `Publisher`; `attachments`, the directory of the model
    or its config.json and tokenizer, should be among them. `background` is not: a sync returns when its version is out.

    `model` is the model that TRL trains. Give it for a mixture-of-experts model: TRL sends the names of the live model, in which
    transformers has fused the experts, and vLLM loads the names of checkpoints.
    """

    def __init__(
        self,
        url: str | Path | Store,
        *,
        server: str | None = None,
        engines: int = 1,
        dtype: torch.dtype | None = None,
        timeout: float = 600.0,
        model: torch.nn.Module | None = None,
        run: str | None = None,
        attachments: Attachments | None = None,
        tokenizer: Any = None,
        refuse_nonfinite: bool = False,
        resume_from: int | None = None,
        starts_full: bool = False,
        options: WriterOptions | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.versions: list[Version] = []
        """What was published, in order: TRL's model version n is the n-th of these, counted from 1."""
        self._url = url
        self._server = server.rstrip("/") if server else None
        self._engines = engines
        self._dtype = dtype
        self._timeout = timeout
        self._layout = None if model is None else CheckpointLayout(model)
        self._on_event = on_event
        self._options = options or WriterOptions()
        self._publisher_arguments: dict[str, Any] = {
            "run": run,
            "attachments": attachments,
            "tokenizer": tokenizer,
            "refuse_nonfinite": refuse_nonfinite,
            "resume_from": resume_from,
            "starts_full": starts_full,
        }
        self._store: Store | None = None
        self._publisher: Publisher | None = None
        self._first_step = 0

    @property
    def publisher(self) -> Publisher:
        """What the weights go through; TRL makes it when training begins. `EngineError` before and after."""
        if self._publisher is None:
            raise EngineError("init_weight_transfer was not called.")
        return self._publisher

    @property
    def store(self) -> Store:
        """Where they go. `EngineError` as for `publisher`."""
        if self._store is None:
            raise EngineError("init_weight_transfer was not called.")
        return self._store

    def init_weight_transfer(self) -> None:
        """Take the run over. Called by TRL before the first sync."""
        if self._publisher is None:
            self._store = open_store(self._url, options=self._options.store, on_event=self._on_event)
            self._publisher = Publisher(
                self._store, dtype=self._dtype, options=self._options, on_event=self._on_event, **self._publisher_arguments
            )
            newest = self._publisher.version
            self._first_step = 0 if newest is None or newest.step is None else newest.step + 1

    def pause(self) -> None:
        """Nothing: servers generate while weights are encoded and uploaded. The sidecar pauses its server for the swap alone."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish the weights, and wait until they are served."""
        publisher = self.publisher
        state = {name: self._on_wire(tensor) for name, tensor in iterator}
        if self._layout is not None:
            state = self._layout.convert(state)
        version = publisher.publish(state, step=self._first_step + len(self.versions))
        assert isinstance(version, Version)
        self.versions.append(version)
        self._wait(version)

    def resume(self) -> None:
        """Nothing, as for `pause`."""

    def destroy(self) -> None:
        """Let go of the run and the store. Called by TRL at the end."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        if self._store is not None and self._store is not self._url:
            self._store.close()
        self._store = None

    def _on_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(device="cpu", dtype=dtype)

    def _wait(self, version: Version) -> None:
        if self._server is None and not self._engines:
            return
        deadline = time.monotonic() + self._timeout
        told: set[object] = set()
        while not self._is_served(version, told):
            if time.monotonic() > deadline:
                raise EngineError(f"no engine serves {version.describe()} after {self._timeout:.0f} s. Is `deltawire sidecar` running?")
            time.sleep(_LOOK)

    def _is_served(self, version: Version, told: set[object]) -> bool:
        if self._server is not None:
            try:
                return VllmRoutes(self._server).weight_version() == str(version.seq)
            except (EngineUnreachable, RouteFailed):  # it is being restarted; the sidecar brings it back
                return False
        assert self._store is not None
        serving = 0
        for report in read_reports(self._store, ChainLog(self._store).run):
            serving += report.state == SERVING and report.seq is not None and report.seq >= version.seq
            if report.state in (QUARANTINED, REFUSED) and report not in told:
                told.add(report)
                emit(self._on_event, "engine-failed", reader=report.reader, state=report.state, seq=report.seq, reason=report.error)
        return serving >= self._engines
