"""A sidecar follows the chains of LoRA adapters. The server is a double, except in the last test."""

from __future__ import annotations

import json
import sys
import threading
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import typer
from live_server import LiveServer, LiveSidecar, wait_until
from lora_server import FILES, Server
from support import bits_of
from tiny_checkpoints import HEAD, HEADS, HIDDEN, TinyModel

from deltawire import Publisher
from deltawire.chain.reader_options import ReaderOptions
from deltawire.cli.options.adapters import read_adapters, read_member_adapters, with_adapters
from deltawire.engines.vllm.driver.lora import CONFIG, WEIGHTS
from deltawire.engines.vllm.driver.lora_follower import LoraFollower, adapter_folder, following
from deltawire.engines.vllm.driver.routes import EngineUnreachable, VllmRoutes
from deltawire.engines.vllm.driver.sidecar import Sidecar
from deltawire.errors import EngineAsleep, EngineRefused, NoChain, StoreUnavailable
from deltawire.events import Event
from deltawire.format.checkpoints.checkpoint import Checkpoint
from deltawire.rl.member import MemberOptions
from deltawire.rl.member import serve as serve_as_member
from deltawire.trainers import join_bundles

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

from markdown_blocks import blocks_run_by


class Scene:
    """An adapter in training, the chain that it is published to, and the double of a server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights = {"q_proj.lora_A.weight": np.zeros((8, 4), np.float32), "q_proj.lora_B.weight": np.ones((4, 8), np.float32)}
        (folder / CONFIG).write_bytes(FILES[CONFIG])
        self.publisher = Publisher(folder / "store", attachments={CONFIG: folder / CONFIG})
        self.server = Server()
        self.events: list[Event] = []
        self.follower = self.start()

    def start(self, name: str = "math", **options: Any) -> LoraFollower:
        settings = ReaderOptions(reader="engine", patience=0)
        return LoraFollower(
            self.server, name, self.folder / "store", self.folder / "lora", options=settings, on_event=self.events.append, **options
        )

    def publish(self) -> None:
        self.weights["q_proj.lora_A.weight"][0] += 1
        self.publisher.publish(self.weights)

    def names(self, event: str) -> list[Any]:
        return [each.fields["adapter"] for each in self.events if each.name == event]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.follower.close()
    made.publisher.close()


def test_each_version_of_the_chain_is_loaded_under_its_own_name(scene: Scene) -> None:
    with pytest.raises(NoChain):
        scene.follower.step()
    scene.publish()
    assert scene.follower.step() == scene.follower.current == "math-v1"
    assert scene.follower.step() is None
    for _ in range(3):
        scene.publish()
        scene.follower.step()
    assert scene.server.loaded.keys() == {"other", "math-v3", "math-v4"}
    assert bits_of(Checkpoint(Path(scene.server.loaded["math-v4"]) / WEIGHTS)) == bits_of(scene.weights)
    assert scene.names("adapter-loaded") == [f"math-v{number}" for number in (1, 2, 3, 4)]
    assert scene.names("adapter-unloaded") == ["math-v1", "math-v2"]


def test_a_new_sidecar_finds_what_the_server_has(scene: Scene) -> None:
    scene.publish()
    scene.follower.step()
    calls = list(scene.server.calls)
    again = scene.start()
    again.step()
    assert (again.current, scene.server.calls) == ("math-v1", calls)
    scene.publish()
    again.step()
    assert scene.server.loaded.keys() == {"other", "math-v1", "math-v2"}
    again.close()


def test_a_restarted_server_gets_the_newest_version_even_without_the_store(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.publish()
    scene.follower.step()
    scene.server.loaded.clear()

    def fails(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("no store.")

    monkeypatch.setattr(type(scene.follower._store), "get", fails)
    with pytest.raises(StoreUnavailable):
        scene.follower.step()
    assert scene.server.loaded.keys() == {"math-v1"}


def test_nothing_is_loaded_into_a_server_that_is_asleep(scene: Scene) -> None:
    scene.publish()
    scene.server.asleep = True
    with pytest.raises(EngineAsleep):
        scene.follower.step()
    assert not scene.server.calls
    scene.server.asleep = False
    assert scene.follower.step() == "math-v1"


def test_a_refused_version_leaves_the_one_before(scene: Scene) -> None:
    scene.publish()
    scene.follower.step()
    scene.publish()
    scene.server.refuses = True
    for _ in range(2):
        with pytest.raises(EngineRefused, match="max_lora_rank"):
            scene.follower.step()
    assert scene.follower.current == "math-v1"
    assert scene.server.loaded.keys() == {"other", "math-v1"}
    scene.server.refuses = False
    assert scene.follower.step() == "math-v2"


def test_a_server_with_too_few_places_is_refused_at_once(scene: Scene) -> None:
    scene.publish()
    scene.server.most = 1
    with pytest.raises(EngineRefused, match="--max-loras 2 or more"):
        scene.follower.step()
    assert not scene.server.calls


def test_a_chain_with_several_bundles_gives_the_one_of_the_name(scene: Scene) -> None:
    scene.publisher.publish(join_bundles({"base": np.zeros(3, np.float32)}, math=scene.weights, code=scene.weights))
    scene.follower.step()
    assert bits_of(Checkpoint(Path(scene.server.loaded["math-v1"]) / WEIGHTS)) == bits_of(scene.weights)
    other = scene.start("poems")
    with pytest.raises(EngineRefused, match="no bundle of this name, but code, math"):
        other.step()
    other.close()


def test_failures_are_told_once_and_tried_again(scene: Scene) -> None:
    scene.publish()
    scene.server.lost = True
    loaded, failed, stop = threading.Event(), threading.Event(), threading.Event()

    def listen(event: Event) -> None:
        scene.events.append(event)
        loaded.set() if event.name == "adapter-loaded" else failed.set() if event.name == "adapter-failed" else None

    follower = LoraFollower(scene.server, "math", scene.folder / "store", scene.folder / "lora", on_event=listen)
    steps: list[None] = []
    step = follower.step

    def counted() -> str | None:
        steps.append(None)
        if len(steps) == 3:
            scene.server.lost = False
        return step()

    follower.step = counted  # type: ignore[method-assign]
    with following([follower], poll=0.001):
        failed.wait()
        assert follower.problem is not None
        loaded.wait()
        stop.set()
    assert scene.names("adapter-failed") == ["math"]
    assert [event.fields["error"] for event in scene.events if event.name == "adapter-failed"] == [EngineUnreachable.__name__]


def test_readiness_waits_for_every_adapter(scene: Scene) -> None:
    followers = [scene.follower]
    assert with_adapters((False, {"reason": "x"}), followers) == (False, {"reason": "x", "adapters": {"math": None}})
    is_ready, told = with_adapters((True, {"seq": 3}), followers)
    assert not is_ready
    assert "'math' has no version yet" in told["reason"]
    scene.publish()
    scene.follower.step()
    assert with_adapters((True, {"seq": 3}), followers) == (True, {"seq": 3, "adapters": {"math": "math-v1"}})
    assert with_adapters((True, {"seq": 3}), []) == (True, {"seq": 3})


def test_adapters_are_given_as_name_and_url(tmp_path: Path) -> None:
    store = str(tmp_path / "a=b")
    assert read_adapters([f"math={store}", "code=s3://bucket/code"]) == {"math": store, "code": "s3://bucket/code"}
    assert read_adapters(None) == {}
    for wrong in (["math"], ["=s3://x"], ["math="], ["math=/a", "math=/b"], ["math=memory://x"], ["math=foo://x"]):
        with pytest.raises(typer.BadParameter):
            read_adapters(wrong)
    with pytest.raises(EngineRefused, match="cannot name"):
        LoraFollower(Server(), "../x", tmp_path / "store")
    assert adapter_folder(tmp_path, "http://a") != adapter_folder(tmp_path, "http://b")


def test_only_members_with_a_server_take_adapters() -> None:
    assert read_member_adapters(["math=/a", "code=/b"], "vllm=http://127.0.0.1:8000") == (("math", "/a"), ("code", "/b"))
    assert read_member_adapters(None, "transformers") == ()
    with pytest.raises(typer.BadParameter, match="only vLLM servers"):
        read_member_adapters(["math=/a"], "transformers")
    with pytest.raises(ValueError, match="only vLLM servers"):
        MemberOptions("store", "transformers", ("m:f",), lora=(("math", "/a"),))


def tiny_adapter(strength: float) -> dict[str, Any]:
    """Return an adapter of the tiny model's query projections. With strength 0 it changes nothing."""
    rng = np.random.default_rng(3)
    state: dict[str, Any] = {}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        state[f"{prefix}.lora_A.weight"] = rng.normal(size=(8, HIDDEN)).astype(ml_dtypes.bfloat16)
        state[f"{prefix}.lora_B.weight"] = (strength * rng.normal(size=(HEADS * HEAD, 8))).astype(ml_dtypes.bfloat16)
    return state


@pytest.mark.slow
def test_a_server_serves_versions_of_an_adapter_and_its_base_is_updated_below_them(
    start_run: Callable[..., Any], serve: Callable[..., LiveServer], follow: Callable[..., LiveSidecar], tmp_path: Path
) -> None:
    run = start_run(TinyModel("dense"))
    run.publish(changed=False, step=0)
    options: dict[str, Any] = {
        "arguments": ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"],
        "environment": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
    }
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none", "task_type": "CAUSAL_LM"}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    server = serve(run.checkpoint, **options).wait()
    events: list[Event] = []
    sidecar = Sidecar(server.url, run.store, spool=tmp_path / "spool", on_event=events.append)
    sidecar.step()
    follower = LoraFollower(server.url, "math", tmp_path / "adapter", tmp_path / "lora", on_event=events.append)
    publisher = Publisher(tmp_path / "adapter", attachments={CONFIG: tmp_path / CONFIG})
    base = server.generate()
    for strength in (0.0, 3.0):
        publisher.publish(tiny_adapter(strength))
        follower.step()
    changed = server.generate(model="math-v2")
    assert server.generate(model="math-v1") == base != changed

    server.routes.pause("keep", clear_cache=False)  # so that the next request is not over before the test has looked at it
    ended: list[list[int]] = []
    asking = threading.Thread(target=lambda: ended.append(server.generate(model="math-v1")))
    asking.start()
    wait_until(lambda: bool(server.routes.used_adapters()), "the request arrives")
    assert server.routes.used_adapters() == {server.routes.adapters()["math-v1"]}
    publisher.publish(tiny_adapter(0.0))
    follower.step()
    assert server.routes.adapters().keys() == {"math-v1", "math-v2", "math-v3"}
    run.publish(step=1)
    sidecar.step()  # the workers drop all adapters, and the request reads its own again
    server.routes.resume()
    asking.join()
    follower.step()
    assert server.routes.used_adapters() == frozenset()
    assert server.routes.adapters().keys() == {"math-v2", "math-v3"}
    assert [event.fields["live"] for event in events if event.name == "swapped"] == [1]
    after = {model: server.generate(model=model) for model in ("tiny", "math-v2", "math-v3")}
    assert [after["tiny"]] == [after["math-v3"]] == ended
    assert after["math-v2"] != after["tiny"] != base
    with pytest.raises(urllib.error.HTTPError, match="404"):
        server.generate(model="math-v1")
    server.kill()

    fresh = serve(run.saved(), **options).wait()
    publisher.publish(tiny_adapter(3.0))
    (block,) = blocks_run_by("tests/vllm/test_lora_follower.py", "docs/serve.md")
    words = block.text.split()
    assert words[:-1] == ["deltawire", "sidecar", "--engine", "http://127.0.0.1:8000", "--from", "s3://bucket/run", "--lora"]
    command = follow(fresh.url, run.store, "--lora", words[-1].replace("s3://bucket/math", str(tmp_path / "adapter")))
    wait_until(lambda: bool(command.events("adapter-loaded")), "the adapter")
    assert [event["adapter"] for event in command.events("adapter-loaded")] == ["math-v4"]
    assert fresh.generate() == after["tiny"]
    assert fresh.generate(model="math-v4") == after["math-v2"]
    command.kill()

    publisher.publish(tiny_adapter(0.0))
    version, told, stop = run.publish(step=2), [], threading.Event()
    options = MemberOptions(
        run.store, f"vllm={fresh.url}", ("tiny_checkpoints:train",), "m", poll=0.05, lora=(("math", str(tmp_path / "adapter")),)
    )
    member = threading.Thread(target=serve_as_member, args=(options,), kwargs={"stop": stop, "on_event": told.append})
    member.start()
    wait_until(lambda: "math-v5" in fresh.routes.adapters() and fresh.routes.weight_version() == str(version.seq), "both versions")
    stop.set()
    member.join()
    loaded = [event.fields for event in told if event.name == "adapter-loaded"]
    assert [(fields["adapter"], fields["member"]) for fields in loaded] == [("math-v5", "m")]
    assert fresh.generate() == fresh.generate(model="math-v5") != fresh.generate(model="math-v4")
    for each in (follower, sidecar, publisher):
        each.close()


@pytest.mark.parametrize(
    ("backend", "answers", "used", "asleep"),
    [
        ("deltawire", [{"used": ["/a"], "asleep": False}], {"/a"}, False),
        ("deltawire", [{"used": [], "asleep": True}], set(), True),
        ("deltawire", [], None, True),  # data parallelism; /is_sleeping tells the rest
        ("deltawire", [{"unknown": 1}], None, True),
        ("nccl", AssertionError("its workers do not know the call"), None, True),
        (None, AssertionError("its workers do not know the call"), None, True),
    ],
)
def test_only_servers_with_our_backend_are_asked_what_requests_use(
    backend: str | None, answers: Any, used: set[str] | None, asleep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(_: VllmRoutes, route: str) -> Any:
        if route == "/is_sleeping":
            return {"is_sleeping": True}
        return {"vllm_config": {"weight_transfer_config": None if backend is None else {"backend": backend}}}

    def call(*_: Any) -> Any:
        if isinstance(answers, Exception):
            raise answers
        return answers

    monkeypatch.setattr(VllmRoutes, "_get", get)
    monkeypatch.setattr(VllmRoutes, "call_workers", call)
    routes = VllmRoutes("http://127.0.0.1:1")
    assert routes.used_adapters() == used
    assert routes.is_asleep() is asleep
