"""Publish from a Hugging Face `Trainer`, or from any trainer that accepts its callbacks, such as those of TRL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import TrainerCallback

from ..events import OnEvent
from ..publish import Publisher, WriterOptions
from ..publish.attachments.model_files import files_of_model
from ..publish.attachments.read_files import Attachments
from ..publish.snapshots import SnapshotDevice
from ..publish.weight_source import WeightSource
from ..quantise import Recipe
from ..store import Store
from ..telemetry.trackers import join_run
from ..tensors.casting import Casting, WireDType
from ..tensors.module_tensors import NameMap


class DeltaWireCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not installed where types are checked
    """Publishes the model before the first step and after every `every` steps, in the background.

    >>> with DeltaWireCallback("s3://bucket/run", dtype=torch.bfloat16) as callback:
    ...     Trainer(model, args, train_dataset=data, callbacks=[callback]).train()

    Each version records the trainer's global step. The configuration of the model and its tokenizer are published with it, so every version
    loads like any checkpoint. Only the main process publishes, and it must hold all weights. FSDP and DeepSpeed ZeRO-3 shard them: use
    `FSDPPublisher` there. An error in the background is raised at the next step that publishes, or at the end of training.

    If training raises, leaving the `with` block publishes the steps that were accepted. Without `with`, that happens when the process ends.

    Parameters
    ----------
    url
        The location of the chain: a URL, a directory, or an open `Store`.
    every
        Publish after every this many steps.
    dtype
        The type that the engines serve. See `Publisher`.
    quantise
        The recipe by which weights are quantised before they are published, such as "fp8-block", or a `Recipe`. See `Publisher`.
    names
        Maps the names of a checkpoint to the published names, or to None for tensors that are not published. See `WeightSource`.
    keep
        Tells for each published name whether the tensor is published.
    run
        The name of a new run, or the run that must be at `url` (else `RunMismatch`).
    background
        Copy the weights and continue at once; a thread encodes and uploads them.
    snapshot
        Where copies of weights on a GPU are kept: "host", in pinned memory of the host, or "device", on the GPU itself. The
        latter needs room for two more copies of the model (three if the store is slower than training); then only deltas leave the GPU.
    attachments
        Further files of each version: a directory, or names with bytes or paths. They replace the model's own configuration.
    tokenizer
        A tokenizer whose files are published with the model. The default is the trainer's `processing_class`.
    refuse_nonfinite, resume_from_seq, starts_full, options, on_event
        As for `Publisher`.
    """

    def __init__(
        self,
        url: str | Path | Store,
        every: int = 1,
        *,
        dtype: WireDType | None = None,
        quantise: str | Recipe | None = None,
        names: NameMap | None = None,
        keep: Callable[[str], bool] = lambda name: True,
        run: str | None = None,
        background: bool = True,
        snapshot: SnapshotDevice = "host",
        attachments: Attachments | None = None,
        tokenizer: Any = None,
        refuse_nonfinite: bool = False,
        resume_from_seq: int | None = None,
        starts_full: bool = False,
        options: WriterOptions | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, not {every}")
        self._url = url
        self._every = every
        self._source_options: dict[str, Any] = {"names": names, "keep": keep}
        self._dtype = dtype
        self._attachments = attachments
        self._tokenizer = tokenizer
        self._publisher_arguments: dict[str, Any] = {
            "run": run,
            "background": background,
            "snapshot": snapshot,
            "dtype": dtype,
            "quantise": quantise,
            "refuse_nonfinite": refuse_nonfinite,
            "resume_from_seq": resume_from_seq,
            "starts_full": starts_full,
            "options": options,
            "on_event": on_event,
        }
        self._source: WeightSource | None = None
        self._model: Any = None
        self._files: dict[str, bytes] = {}
        self._published_step: int | None = None
        self.publisher: Publisher | None = None
        """The publisher. It is open while training runs."""

    def close(self) -> None:
        """Publish everything that was accepted, and close the publisher. Training that ends normally has done this already."""
        publisher, self.publisher = self.publisher, None
        if publisher is not None:
            publisher.close()

    def __enter__(self) -> DeltaWireCallback:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        publisher, self.publisher = self.publisher, None
        if publisher is not None:
            publisher.__exit__(kind, error, traceback)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, processing_class: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.close()  # the last call of `train` raised, so it did not close the publisher
        join_run(self._publisher_arguments["on_event"])  # the trainer's own trackers have begun their runs before
        self._source = WeightSource(model, **self._source_options)
        self._model = model
        self._take_files()
        self.publisher = Publisher(
            self._url,
            attachments=self._files if self._attachments is None else self._attachments,
            tokenizer=processing_class if self._tokenizer is None else self._tokenizer,
            **self._publisher_arguments,
        )
        self._publish(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.publisher is not None and state.global_step % self._every == 0:
            self._publish(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.publisher is None:
            return
        publisher, self.publisher = self.publisher, None
        with publisher:
            if self._published_step != state.global_step:
                assert self._source is not None
                self._take_files()
                self._source.publish(publisher, step=state.global_step)

    def _take_files(self) -> None:
        """Read the model's configuration as it is now. The publisher reads these files at every version."""
        self._files.clear()
        self._files.update(files_of_model(self._model, Casting(self._dtype).dtype))

    def _publish(self, step: int) -> None:
        assert self.publisher is not None
        assert self._source is not None
        self._take_files()
        self._source.publish(self.publisher, step=step)
        self._published_step = step
