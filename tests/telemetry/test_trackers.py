"""Loggers pass the numbers of events on to trackers, under the names that their users know.

Doubles of trackers show what loggers do at the edges. The real Trackio, W&B (offline) and tensorboardX show that they take it: the tests
read what they have stored.
"""

from __future__ import annotations

import contextvars
import json
import math
import os
import struct
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from deltawire.errors import TelemetryUnavailable
from deltawire.events import Event, OnEvent, emit, tell_all
from deltawire.telemetry import TensorBoardLogger, TrackioLogger, WandbLogger
from deltawire.telemetry.trackers import join_run, tracked

TRAINED = {
    "step": 3,
    "seq": 9,
    "bytes": 1000,
    "state_bytes": 8000,
    "changed": 10,
    "publish_seconds": 0.5,
    "idle_seconds": 0.25,
    "train_seconds": 2.0,
    "loss": -0.125,
    "reward": 0.75,
    "rewards/accuracy/mean": 0.5,
    "completions/mean_length": 12.0,
    "lag": None,
}
SWAPPED = {
    "engine": "vllm",
    "seq": 9,
    "updates": 4,
    "step": 2,
    "pause_seconds": 0.004,
    "wait_seconds": 0.0,
    "apply_seconds": 0.002,
    "confirm_seconds": 0.001,
    "full_scan": 0,
}
FAILURE = {"step": 4, "error": "StoreDenied", "reason": "no permission"}


def emit_all(listener: OnEvent) -> None:
    emit(listener, "trained", **TRAINED)
    emit(listener, "swapped", **SWAPPED)
    for _ in range(2):
        emit(listener, "publish-failed", **FAILURE)


def test_metrics_have_the_names_of_hugging_face_and_trl():
    found = tracked(Event("trained", {**TRAINED, "entropy": math.nan}))
    assert found["train/loss"] == -0.125
    assert found["train/rewards/accuracy/mean"] == 0.5
    assert found["train/completions/mean_length"] == 12.0
    assert not {"train/step", "train/seq", "train/lag", "train/entropy"} & found.keys()
    assert tracked(Event("swapped", SWAPPED))["deltawire/swap/pause_seconds"] == 0.004
    assert tracked(Event("evaluated", {"step": 1, "accuracy": 0.5})) == {"eval/accuracy": 0.5}
    assert tracked(Event("retrying", {"reason": "r", "attempt": 2})) == {}


class RunDouble:
    """A run of either tracker."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.alerts: list[tuple[str, str]] = []
        self.steps_of: dict[str, str | None] = {}
        self.is_finished = False

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is None, "W&B drops numbers of a lower step than the last one"
        self.logged.append(metrics)

    def alert(self, title: str, text: str, level: Any = None) -> None:
        self.alerts.append((title, text))

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.steps_of[name] = step_metric

    def finish(self) -> None:
        self.is_finished = True


def check_run(run: RunDouble) -> None:
    trained, swapped = run.logged
    assert (trained["train/global_step"], trained["train/reward"]) == (3, 0.75)
    assert (swapped["train/global_step"], swapped["deltawire/swap/pause_seconds"]) == (2, 0.004)
    assert run.alerts == [("deltawire: publish-failed", "no permission")]


@pytest.fixture
def wandb_double(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = types.ModuleType("wandb")
    module.run = None
    module.init = lambda **options: RunDouble()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def trackio_double(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = types.ModuleType("trackio")
    current: contextvars.ContextVar[Any] = contextvars.ContextVar("current_run", default=None)
    module.context_vars = types.SimpleNamespace(current_run=current)
    module.AlertLevel = types.SimpleNamespace(ERROR="error")
    module.init = lambda **options: RunDouble()
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module


def test_wandb_joins_the_run_that_is_active(wandb_double: Any) -> None:
    logger = WandbLogger()
    emit_all(logger)  # there is no run yet
    run = wandb_double.run = RunDouble()
    logger = WandbLogger()
    emit_all(logger)
    check_run(run)
    assert run.steps_of == {"train/global_step": None, **dict.fromkeys(["train/*", "eval/*", "deltawire/*"], "train/global_step")}
    logger.close()
    assert not run.is_finished


def test_wandb_can_have_a_run_of_its_own(wandb_double: Any) -> None:
    with WandbLogger("project", mode="offline") as logger:
        run = logger._own
        emit_all(logger)
    check_run(run)
    assert run.is_finished


def test_trackio_joins_the_run_of_the_trainers_thread(trackio_double: Any) -> None:
    logger = TrackioLogger()
    run = RunDouble()
    trackio_double.context_vars.current_run.set(run)
    join_run(tell_all(print, logger))  # as trainers do when training begins
    thread = threading.Thread(target=emit_all, args=(logger,))  # a publisher emits on a thread of its own
    thread.start()
    thread.join()
    check_run(run)
    logger.close()
    assert not run.is_finished
    trackio_double.context_vars.current_run.set(None)


def test_trackio_can_have_a_run_of_its_own(trackio_double: Any) -> None:
    with TrackioLogger("project", name="run") as logger:
        run = logger._run
        emit_all(logger)
    check_run(run)
    assert run.is_finished


def test_alerts_are_bounded(wandb_double: Any) -> None:
    run = wandb_double.run = RunDouble()
    logger = WandbLogger()
    for number in range(300):
        emit(logger, "publish-failed", error="E", reason=f"{number} {'x' * 5000}")
    assert len(run.alerts) == 100
    assert max(len(text) for _, text in run.alerts) == 1000


@pytest.mark.parametrize(("package", "make"), [("wandb", WandbLogger), ("trackio", TrackioLogger)])
def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, package: str, make: Any) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TelemetryUnavailable, match=f"pip install {package}"):
        make()


def test_without_tensorboard_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("tensorboardX", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TelemetryUnavailable, match="pip install tensorboardX"):
        TensorBoardLogger(tmp_path)


def test_tensorboard_files_have_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    from tensorboardX.proto.event_pb2 import Event as Record

    with TensorBoardLogger(tmp_path) as logger:
        emit_all(logger)
    (file,) = tmp_path.iterdir()
    data, values = file.read_bytes(), {}
    while data:  # each record: its length, a checksum, the record, a checksum
        (length,) = struct.unpack("<Q", data[:8])
        record = Record.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        values |= {value.tag: (record.step, value.simple_value) for value in record.summary.value}
    assert values["train/loss"] == (3, -0.125)
    assert values["train/rewards/accuracy/mean"] == (3, 0.5)
    assert values["deltawire/swap/full_scan"] == (2, 0.0)
    assert any("publish-failed" in name for name in values)


def test_the_real_wandb_takes_it_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger joins the run that is active, even if it is made before the run, and does not end it."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = wandb.Settings(x_disable_stats=True, x_disable_machine_info=True, disable_git=True, console="off")
    logger = WandbLogger()
    emit_all(logger)  # there is no run yet
    run = wandb.init(project="deltawire", mode="offline", dir=tmp_path, settings=settings)
    thread = threading.Thread(target=emit_all, args=(logger,))  # a publisher emits on a thread of its own
    thread.start()
    thread.join()
    logger.close()
    assert wandb.run is run
    summary = dict(run.summary)
    run.finish()
    assert (summary["train/loss"], summary["deltawire/swap/pause_seconds"]) == (-0.125, 0.004)
    assert summary["train/global_step"] == 2  # that of the last event


REAL_TRACKIO = """
import json, sys, threading, trackio
from deltawire.events import Event, tell_all
from deltawire.telemetry import TrackioLogger
from deltawire.telemetry.trackers import join_run
from trackio.sqlite_storage import SQLiteStorage

with TrackioLogger("own", name="run", auto_log_cpu=False) as logger:
    logger(Event("trained", {"step": 3, "loss": -0.125}))
logger = TrackioLogger()
logger(Event("trained", {"step": 1, "loss": 9.0}))  # there is no run yet
trackio.init(project="joined", name="run", auto_log_cpu=False)
join_run(tell_all(print, logger))  # as trainers do when training begins
thread = threading.Thread(target=logger, args=[Event("trained", {"step": 4, "loss": 0.5})])
thread.start()
thread.join()
logger.close()
trackio.log({"train/loss": 0.25, "train/global_step": 5})  # the run continues
trackio.finish()
print(json.dumps([SQLiteStorage.get_logs(project, "run") for project in ("own", "joined")]), file=sys.stderr)
"""


def test_the_real_trackio_takes_it(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRACKIO_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", REAL_TRACKIO], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    own, joined = json.loads(done.stderr.splitlines()[-1])
    assert [(row["train/loss"], row["train/global_step"]) for row in own] == [(-0.125, 3)]
    assert [(row["train/loss"], row["train/global_step"]) for row in joined] == [(0.5, 4), (0.25, 5)]
