"""Loggers for trackers of experiments: Trackio, Weights & Biases, TensorBoard."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from ..errors import TelemetryUnavailable
from ..events import Event, Listeners, OnEvent
from ..events.registry import REGISTRY
from .metric import number

GLOBAL_STEP = "train/global_step"
"""The metric that Hugging Face's trainers log with every other one, as their step."""

_GROUPS = {
    "trained": "train",
    "evaluated": "eval",
    "published": "deltawire/publish",
    "anchored": "deltawire/anchor",
    "skip-made": "deltawire/skip",
    "collected": "deltawire/collect",
    "synced": "deltawire/sync",
    "swapped": "deltawire/swap",
    "canary-passed": "deltawire/canary",
    "relayed": "deltawire/relay",
}
"""The events that have numbers to look at, and what their metrics begin with."""
_NAMES = {"step", "seq", "updates", "epoch", "base", "floor"}
"""Fields that are numbers, but only name something."""


def tracked(event: Event) -> dict[str, float]:
    """Return the metrics of an event: its finite numbers, as `GROUP/FIELD`, such as `train/loss` or `deltawire/swap/pause_seconds`.

    Parameters
    ----------
    event
        The event.
    """
    group = _GROUPS.get(event.name)
    if group is None:
        return {}
    numbers = {name: number(value) for name, value in event.fields.items() if name not in _NAMES}
    return {f"{group}/{name}": value for name, value in numbers.items() if value is not None}


class Tracker(ABC):
    """A listener that logs the numbers of events to a tracker, and passes errors on as alerts. It may be called on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alerted: set[tuple[str, str]] = set()

    def __call__(self, event: Event) -> None:
        """Log an event.

        Parameters
        ----------
        event
            The event.
        """
        kind, metrics = REGISTRY.get(event.name), tracked(event)
        step = number(event.fields.get("step"))
        with self._lock:
            if metrics:
                self._log(metrics, None if step is None else int(step), event)
            if kind is not None and kind.level == "error":
                self._alert_once(event.name, str(event.fields.get("reason") or event.fields.get("error") or kind.meaning))

    def join(self) -> None:  # noqa: B027  # only Trackio needs it
        """Find the run that is active on the calling thread. Trainers call it when training begins."""

    @abstractmethod
    def close(self) -> None:
        """End the run, if this object began it."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _log(self, metrics: dict[str, float], step: int | None, event: Event) -> None: ...

    @abstractmethod
    def _alert(self, title: str, text: str) -> None: ...

    def _alert_once(self, name: str, text: str) -> None:
        """Pass an error on, once for each text. There are at most a hundred."""
        if (name, text) not in self._alerted and len(self._alerted) < 100:
            self._alerted.add((name, text))
            self._alert(f"deltawire: {name}", text[:1000])


class TrackioLogger(Tracker):
    """Logs events to Trackio. Pass it as `on_event`.

    Without a project it joins the run that is active: the one of `trackio.init`, or of a trainer with `report_to="trackio"`. Events that
    come before there is a run are not logged. Each number is logged with the step as `train/global_step`, as Hugging Face's trainers do.
    Errors become alerts.

    Raises `TelemetryUnavailable` if the package trackio is missing.

    Parameters
    ----------
    project
        Begin a run of this project. `close` ends it.
    options
        Further arguments of `trackio.init`, such as `name` or `space_id`.
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        super().__init__()
        try:
            import trackio
        except ImportError:
            raise _missing("trackio") from None
        self._trackio: Any = trackio
        self._is_own = project is not None
        self._run: Any = None if project is None else trackio.init(project=project, **options)
        self.join()

    def join(self) -> None:
        """Find the run that is active on the calling thread. Trackio knows it only there."""
        if not self._is_own:
            self._run = self._trackio.context_vars.current_run.get() or self._run

    def close(self) -> None:
        """End the run, if this object began it."""
        run, self._run = self._run, None
        if self._is_own and run is not None:
            run.finish()
            if self._trackio.context_vars.current_run.get() is run:  # otherwise others would log to a run that has ended
                self._trackio.context_vars.current_run.set(None)

    def _log(self, metrics: dict[str, float], step: int | None, event: Event) -> None:
        self.join()
        if self._run is not None:
            self._run.log(_with_step(metrics, step))

    def _alert(self, title: str, text: str) -> None:
        if self._run is not None:
            self._run.alert(title=title, text=text, level=self._trackio.AlertLevel.ERROR)


class WandbLogger(Tracker):
    """Logs events to Weights & Biases. Pass it as `on_event`.

    Without a project it joins the run that is active: the one of `wandb.init`, or of a trainer with `report_to="wandb"`. Events that come
    before there is a run are not logged. Each number is logged with the step as `train/global_step`, as Hugging Face's trainers do, so
    numbers may come in any order of steps. Errors become alerts.

    Raises `TelemetryUnavailable` if the package wandb is missing.

    Parameters
    ----------
    project
        Begin a run of this project. `close` ends it.
    options
        Further arguments of `wandb.init`, such as `name` or `mode`.
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        super().__init__()
        try:
            import wandb
        except ImportError:
            raise _missing("wandb") from None
        self._wandb: Any = wandb
        self._own: Any = None if project is None else wandb.init(project=project, **options)
        self._defined: Any = None

    def close(self) -> None:
        """End the run, if this object began it."""
        run, self._own = self._own, None
        if run is not None:
            run.finish()

    def _active(self) -> Any:
        run = self._own or self._wandb.run
        if run is not None and run is not self._defined:
            self._defined = run
            run.define_metric(GLOBAL_STEP)
            for group in sorted({group.partition("/")[0] for group in _GROUPS.values()}):
                run.define_metric(f"{group}/*", step_metric=GLOBAL_STEP)
        return run

    def _log(self, metrics: dict[str, float], step: int | None, event: Event) -> None:
        if (run := self._active()) is not None:
            run.log(_with_step(metrics, step))

    def _alert(self, title: str, text: str) -> None:
        if (run := self._active()) is not None:
            run.alert(title=title, text=text, level="ERROR")


class TensorBoardLogger(Tracker):
    """Logs events to files that TensorBoard reads. Pass it as `on_event`.

    To join the run of a Hugging Face trainer, pass its `logging_dir`. Errors become texts.

    Raises `TelemetryUnavailable` unless tensorboardX, or torch and tensorboard, are installed.

    Parameters
    ----------
    log_dir
        The directory of the run.
    """

    def __init__(self, log_dir: str | Path) -> None:
        super().__init__()
        self._writer: Any = _summary_writer()(str(log_dir))
        self._step = 0

    def close(self) -> None:
        """Write everything, and close the files."""
        with self._lock:
            self._writer.close()

    def _log(self, metrics: dict[str, float], step: int | None, event: Event) -> None:
        self._step = self._step if step is None else step
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, self._step, walltime=event.time)

    def _alert(self, title: str, text: str) -> None:
        self._writer.add_text(title, text, self._step)


def join_run(on_event: OnEvent | None) -> None:
    """Let the trackers among the listeners find the run that is active on this thread.

    Parameters
    ----------
    on_event
        A listener, or several (`tell_all`).
    """
    if isinstance(on_event, Listeners):
        for each in on_event.listeners:
            join_run(each)
    elif isinstance(on_event, Tracker):
        on_event.join()


def _with_step(metrics: dict[str, float], step: int | None) -> dict[str, float]:
    return metrics if step is None else {**metrics, GLOBAL_STEP: step}


def _summary_writer() -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboardX") from None
    return SummaryWriter


def _missing(package: str) -> TelemetryUnavailable:
    return TelemetryUnavailable(f"the package {package} is not installed.", hint=f"Run `pip install {package}`.")
