"""Real vLLM servers run as processes that are forked from one that has imported vLLM. Without vLLM these tests are skipped."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from live_server import LiveServer, LiveSidecar, server_environment
from server_nursery import ServerNursery
from servers import seaweedfs
from sidecar_scene import Scene
from tiny_checkpoints import State, TinyModel, train, train_visibly

import deltawire
from deltawire import Publisher, Version
from deltawire.chain.reader_options import ReaderOptions
from deltawire.engines.vllm.driver import routes

__all__ = ["seaweedfs"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: boots servers, takes minutes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = importlib.util.find_spec("vllm")
    if found is not None and found.origin is not None:  # without an origin, the module found is the folder of these tests
        return
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.fixture(autouse=True, scope="session")
def _patience() -> Iterator[None]:
    """Wait longer for answers, because a server that shares two cores with many others may take more than ten seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "_PROMPT", 300.0)
        yield


class Run:
    """A model in training: its weights, and the chain that they are published to. `recipe` quantises them."""

    def __init__(self, folder: Path, model: TinyModel, recipe: str | None = None) -> None:
        self.folder = folder
        self.model = model
        self.state: State = model.state()
        self.checkpoint = model.save(folder / "start", self.state)
        self.store = str(folder / "store")
        self.mirror = folder / "mirror"
        attachments = {path.name: path for path in self.checkpoint.iterdir() if path.suffix == ".json"}
        self.publisher = Publisher(self.store, quantise=recipe, attachments=attachments)
        self._recipe = recipe
        self._rng = np.random.default_rng(7)

    def publish(self, *, changed: bool = True, step: int | None = None) -> Version:
        if changed:
            train(self.state, self._rng) if self._recipe is None else train_visibly(self.state, self._rng)
        version = self.publisher.publish(self.state, step=step)
        assert isinstance(version, Version)
        return version

    def saved(self) -> Path:
        """Write the newest version as a checkpoint, independently of chain and mirror unless it is quantised."""
        assert self.publisher.version is not None
        if self._recipe is not None:
            folder = self.folder / f"saved-{self.publisher.version.seq}"
            deltawire.pull(self.store, folder, options=ReaderOptions(pin=False))
            return folder
        return self.model.save(self.folder / f"saved-{self.publisher.version.seq}", self.state)


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(model: TinyModel, recipe: str | None = None) -> Run:
        runs.append(Run(tmp_path, model, recipe))
        return runs[-1]

    yield start
    for run in runs:
        run.publisher.close()


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerNursery]:
    folder = tmp_path_factory.mktemp("nursery")
    with ServerNursery(folder, server_environment(folder)) as nursery:
        yield nursery


@pytest.fixture
def serve(tmp_path: Path, nursery: ServerNursery) -> Iterator[Callable[..., LiveServer]]:
    servers: list[LiveServer] = []

    def start(model: Path, **options: object) -> LiveServer:
        servers.append(LiveServer(tmp_path, model, nursery=nursery, **options))  # type: ignore[arg-type]
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def follow(tmp_path: Path) -> Iterator[Callable[..., LiveSidecar]]:
    sidecars: list[LiveSidecar] = []

    def start(*arguments: object) -> LiveSidecar:
        sidecars.append(LiveSidecar(tmp_path, *arguments))  # type: ignore[arg-type]
        return sidecars[-1]

    yield start
    for sidecar in sidecars:
        sidecar.kill()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scene = Scene(tmp_path)
    yield scene
    scene.sidecar.close()
    scene.publisher.close()


@pytest.fixture
def one_call(scene: Scene) -> Scene:
    """A scene whose server swaps in one call and serves a version already."""
    scene.server.one_call = True
    scene.serve()
    return scene


@pytest.fixture
def live(one_call: Scene) -> Scene:
    """A scene whose server takes deltas into its live memory, and has its first version."""
    return one_call
