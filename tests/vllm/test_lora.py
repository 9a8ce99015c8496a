"""LoRA adapters of a chain are loaded under the names of their versions. The server is a double with the rules of vLLM's routes."""

from __future__ import annotations

import json
import os
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from live_server import LiveServer
from support import bits_of
from tiny_checkpoints import HEAD, HEADS, HIDDEN, TinyModel

from deltawire.engines.vllm.driver.lora import CONFIG, WEIGHTS, LoraAdapters, adapter_name, base_digest, split_adapter_name
from deltawire.engines.vllm.driver.routes import RouteFailed
from deltawire.engines.vllm.driver.sidecar import Sidecar
from deltawire.errors import EngineRefused, SpoolError
from deltawire.events import Event
from deltawire.format.checkpoints.checkpoint import Checkpoint

FILES = {CONFIG: json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16}).encode()}


class Server:
    """Loads adapters as vLLM does: a name only once, and only if the files are there."""

    def __init__(self, most: int | None = 4) -> None:
        self.most = most
        self.loaded: dict[str, str] = {"other": "/elsewhere"}
        self.calls: list[str] = []
        self.refuses = False

    def adapters(self) -> dict[str, str]:
        return dict(self.loaded)

    def most_adapters(self) -> int | None:
        return self.most

    def load_adapter(self, name: str, folder: str) -> None:
        if self.refuses or name in self.loaded:
            raise RouteFailed("/v1/load_lora_adapter", 400, "rank 64 is greater than max_lora_rank 16")
        assert json.loads((Path(folder) / CONFIG).read_bytes())["r"] == 8
        Checkpoint(Path(folder) / WEIGHTS)
        self.loaded[name] = folder
        self.calls.append(f"+{name}")

    def unload_adapter(self, name: str) -> None:
        if name not in self.loaded:
            raise RouteFailed("/v1/unload_lora_adapter", 404, "cannot be found")
        del self.loaded[name]
        self.calls.append(f"-{name}")


def version(seed: int, *bundles: str, base: int = 0) -> dict[str, Any]:
    """Return a base, which depends on `base`, and adapters, which depend on `seed`."""
    rng = np.random.default_rng(seed)
    state: dict[str, Any] = {"model.weight": np.full((4, 4), base, ml_dtypes.bfloat16)}
    for bundle in bundles or ("math",):
        for part in ("lora_A", "lora_B"):
            state[f"{bundle}:base_model.model.q_proj.{part}.weight"] = rng.normal(size=(8, 4)).astype(ml_dtypes.bfloat16)
        state[f"{bundle}:scale"] = rng.normal(size=3).astype(np.float32)
    return state


def bundle_of(state: dict[str, Any], bundle: str) -> dict[str, Any]:
    return {name.partition(":")[2]: array for name, array in state.items() if name.startswith(f"{bundle}:")}


def test_each_version_is_an_adapter_of_its_own_and_old_ones_go(tmp_path: Path) -> None:
    server = Server()
    events: list[Event] = []
    adapters = LoraAdapters(server, tmp_path / "lora", max_staleness=1, on_event=events.append)
    adapters.check()
    for number in range(1, 6):
        state = version(number, "math", "code-2")
        assert adapters.load(number, state, FILES) == [f"code-2-v{number}", f"math-v{number}"]
        for bundle in ("math", "code-2"):
            held = Checkpoint(tmp_path / "lora" / f"{bundle}-v{number}" / WEIGHTS)
            assert bits_of(held) == bits_of(bundle_of(state, bundle))
    kept = {f"{bundle}-v{number}" for bundle in ("math", "code-2") for number in (3, 4, 5)}
    assert server.loaded.keys() == kept | {"other"}
    assert {path.name for path in (tmp_path / "lora").iterdir()} == kept
    assert server.calls[-4:] == ["+code-2-v5", "+math-v5", "-code-2-v2", "-math-v2"]  # the new ones first
    assert [event.name for event in events].count("adapter-unloaded") == 4
    before = list(server.calls)
    adapters.load(5, state, FILES)
    assert server.calls == before


def test_a_restarted_server_or_sidecar_gets_what_it_lacks(tmp_path: Path) -> None:
    server = Server()
    LoraAdapters(server, tmp_path).load(7, version(7), FILES)
    restarted = Server()
    LoraAdapters(restarted, tmp_path).load(7, version(7), FILES)
    assert restarted.calls == ["+math-v7"]
    for path in (tmp_path / "math-v7").iterdir():
        path.unlink()
    (tmp_path / "math-v7").rmdir()
    LoraAdapters(restarted, tmp_path).load(7, version(7), FILES)
    assert restarted.calls == ["+math-v7", "-math-v7", "+math-v7"]
    for name in ("math-v9.part", "math-v6.part"):  # of a process that was killed
        (tmp_path / name).mkdir()
    LoraAdapters(restarted, tmp_path).load(9, version(9), FILES)
    assert {path.name for path in tmp_path.iterdir()} == {"math-v9"}


def test_adapters_are_unloaded_before_their_base_changes(tmp_path: Path) -> None:
    server = Server()
    adapters = LoraAdapters(server, tmp_path)
    adapters.load(1, version(1), FILES)
    assert base_digest(version(1)) == base_digest(version(2)) != base_digest(version(2, base=1))
    adapters.before_swap(version(2, base=1))
    assert server.loaded.keys() == {"other"}
    assert not list(tmp_path.iterdir())
    adapters.load(2, version(2, base=1), FILES)
    assert server.calls == ["+math-v1", "-math-v1", "+math-v2"]


def test_an_adapter_that_another_client_has_unloaded_is_no_error(tmp_path: Path) -> None:
    server = Server()
    adapters = LoraAdapters(server, tmp_path)
    adapters.load(1, version(1), FILES)
    listed = server.adapters()
    server.adapters = lambda: dict(listed)  # type: ignore[method-assign]
    del server.loaded["math-v1"]
    adapters.before_swap(version(1))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("most", "staleness", "fits"), [(2, 0, True), (1, 0, False), (3, 2, False), (4, 2, True), (None, 9, True)])
def test_a_server_with_too_few_places_for_adapters_is_refused(most: int | None, staleness: int, fits: bool, tmp_path: Path) -> None:
    adapters = LoraAdapters(Server(most), tmp_path, max_staleness=staleness)
    if fits:
        adapters.check()
        return
    with pytest.raises(EngineRefused, match=f"--max-loras {staleness + 2} or more"):
        adapters.check()


def test_a_refused_adapter_leaves_the_old_ones(tmp_path: Path) -> None:
    server = Server()
    adapters = LoraAdapters(server, tmp_path)
    for number in (1, 2):
        adapters.load(number, version(number), FILES)
    server.refuses = True
    with pytest.raises(EngineRefused, match="max_lora_rank"):
        adapters.load(3, version(3), FILES)
    assert server.loaded.keys() == {"other", "math-v1", "math-v2"}


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "has no config"),
        ({CONFIG: b"["}, "cannot be used"),
        ({CONFIG: b"[" * 100_000}, "cannot be used"),
        ({CONFIG: b'{"peft_type": "PREFIX_TUNING", "r": 8}'}, "does not describe"),
        ({CONFIG: b'{"peft_type": "LORA", "r": "8"}'}, "does not describe"),
        ({"adapter_config-math.json": b"{}", **FILES}, "does not describe"),
    ],
    ids=range(6),
)
def test_a_config_that_is_missing_or_hostile_is_refused(files: dict[str, bytes], why: str, tmp_path: Path) -> None:
    server = Server()
    with pytest.raises(EngineRefused, match=why):
        LoraAdapters(server, tmp_path).load(1, version(1), files)
    assert not server.calls
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bundle", ["..", "a/b", "a\\b", "-x", "ä", "x" * 200, "a b"])
def test_a_bundle_whose_name_is_no_file_name_is_refused(bundle: str, tmp_path: Path) -> None:
    with pytest.raises(EngineRefused, match="cannot name"):
        LoraAdapters(Server(), tmp_path).load(1, version(1, bundle), FILES)
    assert not list(tmp_path.iterdir())


def test_names_of_adapters_can_be_split_again() -> None:
    assert split_adapter_name(adapter_name("a-v2", 10)) == ("a-v2", 10)
    for name in ("a", "a-v", "a-v01", "a-v1x", "a-v٣", "a-v" + "9" * 5000, "a-v-1"):
        assert split_adapter_name(name) == (name, None)


def test_a_folder_that_cannot_be_written_is_an_error_of_the_spool(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpoolError):
        LoraAdapters(Server(), tmp_path / "file" / "lora").load(1, version(1), FILES)


def tiny_adapter(strength: float) -> dict[str, Any]:
    """Return an adapter of the tiny model's query projections. With strength 0 it changes nothing."""
    rng = np.random.default_rng(3)
    state: dict[str, Any] = {}
    for layer in range(2):
        prefix = f"math:base_model.model.model.layers.{layer}.self_attn.q_proj"
        state[f"{prefix}.lora_A.weight"] = rng.normal(size=(8, HIDDEN)).astype(ml_dtypes.bfloat16)
        state[f"{prefix}.lora_B.weight"] = (strength * rng.normal(size=(HEADS * HEAD, 8))).astype(ml_dtypes.bfloat16)
    return state


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("DELTAWIRE_TEST_EVERY_SYNC"), reason="it takes a server of its own")
def test_a_server_serves_several_versions_of_an_adapter_side_by_side(
    start_run: Callable[..., Any], serve: Callable[..., LiveServer], tmp_path: Path
) -> None:
    run = start_run(TinyModel("dense"))
    arguments = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
    server = serve(run.checkpoint, arguments=arguments, environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}).wait()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none", "task_type": "CAUSAL_LM"}
    files = {CONFIG: json.dumps(config).encode()}
    with pytest.raises(EngineRefused, match="--max-loras 3 or more"):
        LoraAdapters(server.routes, tmp_path / "lora", max_staleness=1).check()
    adapters = LoraAdapters(server.routes, tmp_path / "lora")
    adapters.check()
    base = server.generate()
    assert adapters.load(1, tiny_adapter(0.0), files) == ["math-v1"]
    assert server.generate(model="math-v1") == base
    adapters.load(2, tiny_adapter(3.0), files)
    changed = server.generate(model="math-v2")
    assert changed != base
    assert server.generate(model="math-v1") == base == server.generate()
    adapters.load(3, tiny_adapter(0.0), files)
    assert server.routes.adapters().keys() == {"math-v2", "math-v3"}
    assert server.generate(model="math-v2") == changed
    assert server.generate(model="math-v3") == base
    with pytest.raises(urllib.error.HTTPError, match="404"):
        server.generate(model="math-v1")
    wide = {CONFIG: json.dumps(config | {"r": 64}).encode()}
    with pytest.raises(EngineRefused, match="rank"):
        adapters.load(4, tiny_adapter(1.0), wide)
    assert server.generate(model="math-v3") == base


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("DELTAWIRE_TEST_EVERY_SYNC"), reason="it takes two servers of its own")
def test_the_base_of_an_adapter_is_updated_in_live_memory(
    start_run: Callable[..., Any], serve: Callable[..., LiveServer], tmp_path: Path
) -> None:
    run = start_run(TinyModel("dense"))
    run.publish(changed=False)
    options = {
        "arguments": ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"],
        "environment": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
    }
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none", "task_type": "CAUSAL_LM"}
    files = {CONFIG: json.dumps(config).encode()}
    server = serve(run.checkpoint, **options).wait()
    adapters = LoraAdapters(server.routes, tmp_path / "lora")
    adapters.load(1, tiny_adapter(3.0), files)
    events: list[Event] = []
    sidecar = Sidecar(server.url, run.store, tmp_path / "mirror", spool=tmp_path / "spool", on_event=events.append)
    sidecar.step()
    for number in (2, 3):
        run.publish()
        adapters.before_swap(tiny_adapter(3.0))
        sidecar.step()
        adapters.load(number, tiny_adapter(3.0), files)
    sidecar.close()
    assert [event.fields["live"] for event in events if event.name == "swapped"] == [1, 1]
    fresh = serve(run.saved(), **options).wait()
    LoraAdapters(fresh.routes, tmp_path / "fresh").load(3, tiny_adapter(3.0), files)
    for model in ("tiny", "math-v3"):
        assert server.generate(model=model) == fresh.generate(model=model)
