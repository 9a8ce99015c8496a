"""LoRA adapters of a chain are loaded under the names of their versions. The server is a double with the rules of vLLM's routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from lora_server import FILES, Clock, Server
from support import bits_of

from deltawire.engines.vllm.driver.lora import CONFIG, WEIGHTS, LoraAdapters, adapter_name, split_adapter_name
from deltawire.errors import EngineRefused, SpoolError
from deltawire.events import Event
from deltawire.format.checkpoints.checkpoint import Checkpoint


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


def folders(place: Path) -> set[str]:
    """Return the adapters that have a directory."""
    return {path.name.rpartition(".")[0] for path in place.iterdir()}


def test_each_version_is_an_adapter_of_its_own_and_old_ones_go(tmp_path: Path) -> None:
    server, clock = Server(), Clock()
    events: list[Event] = []
    adapters = LoraAdapters(server, tmp_path / "lora", max_staleness=1, on_event=events.append, clock=clock)
    adapters.check()
    for number in range(1, 6):
        state = version(number, "math", "code-2")
        assert adapters.load(number, state, FILES) == [f"code-2-v{number}", f"math-v{number}"]
        for bundle in ("math", "code-2"):
            held = Checkpoint(Path(server.loaded[f"{bundle}-v{number}"]) / WEIGHTS)
            assert bits_of(held) == bits_of(bundle_of(state, bundle))
        clock.now += 100
    kept = {f"{bundle}-v{number}" for bundle in ("math", "code-2") for number in (3, 4, 5)}
    assert server.loaded.keys() == kept | {"other"}
    assert server.calls[-4:] == ["+code-2-v5", "+math-v5", "-code-2-v2", "-math-v2"]  # the new ones first
    assert [event.name for event in events].count("adapter-unloaded") == 4
    before = list(server.calls)
    adapters.load(5, state, FILES)
    assert server.calls == before
    assert folders(tmp_path / "lora") == kept


def test_an_adapter_that_a_request_uses_stays_and_its_directory_too(tmp_path: Path) -> None:
    """vLLM reads the directory again in the middle of a step. If it is gone, the engine ends."""
    server, clock = Server(), Clock()
    adapters = LoraAdapters(server, tmp_path, clock=clock)
    adapters.load(1, version(1), FILES)
    server.used = {"math-v1"}
    for number in (2, 3, 7):  # versions may be skipped; the two newest that were loaded stay
        adapters.load(number, version(number), FILES)
        clock.now += 100
    assert server.loaded.keys() == {"other", "math-v1", "math-v3", "math-v7"}
    server.used = set()
    adapters.tidy(["math"], 7)
    assert server.loaded.keys() == {"other", "math-v3", "math-v7"}
    assert folders(tmp_path) == {"math-v1", "math-v3", "math-v7"}  # a request may just be on its way
    clock.now += 100
    server.used = {"math-v1"}  # so it is
    adapters.tidy(["math"], 7)
    assert folders(tmp_path) == {"math-v1", "math-v3", "math-v7"}
    server.used = set()
    adapters.tidy(["math"], 7)
    assert folders(tmp_path) == {"math-v3", "math-v7"}


def test_directories_are_bounded_if_the_server_does_not_tell_what_it_uses(tmp_path: Path) -> None:
    server, clock = Server(), Clock()
    server.used = None
    adapters = LoraAdapters(server, tmp_path, clock=clock)
    for number in range(1, 15):
        adapters.load(number, version(number), FILES)
        clock.now += 1
    assert server.loaded.keys() == {"other", "math-v13", "math-v14"}
    assert folders(tmp_path) == {f"math-v{number}" for number in range(5, 15)}


def test_a_restarted_server_or_sidecar_gets_what_it_lacks(tmp_path: Path) -> None:
    server = Server()
    LoraAdapters(server, tmp_path).load(7, version(7), FILES)
    (folder,) = tmp_path.iterdir()
    stamp = (folder / WEIGHTS).stat().st_mtime_ns
    restarted, clock = Server(), Clock()
    LoraAdapters(restarted, tmp_path).load(7, version(7), FILES)
    assert restarted.calls == ["+math-v7"]
    assert (folder / WEIGHTS).stat().st_mtime_ns == stamp  # it was read, and not written again
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    LoraAdapters(restarted, tmp_path).load(7, version(7), FILES)
    assert restarted.calls == ["+math-v7", "-math-v7", "+math-v7"]
    half_written = tmp_path / f"{folder.name.replace('v7', 'v6')}.part"  # by a process that was killed
    half_written.mkdir()
    adapters = LoraAdapters(restarted, tmp_path, clock=clock)
    for number in (8, 9, 9):
        adapters.load(number, version(number), FILES)
        clock.now += 100
    assert folders(tmp_path) == {"math-v8", "math-v9"}


@pytest.mark.parametrize("damage", ["weights", "config", "short"])
def test_a_directory_that_is_not_what_it_should_be_is_written_again(damage: str, tmp_path: Path) -> None:
    LoraAdapters(Server(), tmp_path).load(7, version(7), FILES)
    (folder,) = tmp_path.iterdir()
    held = (folder / WEIGHTS).read_bytes()
    if damage == "config":
        (folder / CONFIG).write_bytes(FILES[CONFIG].replace(b"16", b"32"))
    else:
        (folder / WEIGHTS).write_bytes(held[:-1] + bytes([held[-1] ^ 1]) if damage == "weights" else held[:-9])
    restarted = Server()
    LoraAdapters(restarted, tmp_path).load(7, version(7), FILES)
    assert restarted.calls == ["+math-v7"]
    assert (folder / WEIGHTS).read_bytes() == held
    assert json.loads((folder / CONFIG).read_bytes())["lora_alpha"] == 16


def test_a_version_of_another_run_does_not_pass_for_the_one_with_its_number(tmp_path: Path) -> None:
    """vLLM finds keys and values of a prompt by the name and the directory of the adapter."""
    server, clock = Server(), Clock()
    adapters = LoraAdapters(server, tmp_path, clock=clock)
    for number in (1, 2, 3):
        adapters.load(number, version(number), FILES)
    old = server.loaded["math-v2"]
    again = LoraAdapters(server, tmp_path, clock=clock)
    again.load(1, version(11), FILES)
    assert server.loaded.keys() == {"other", "math-v1", "math-v3"}
    again.load(2, version(12), FILES)
    assert server.loaded.keys() == {"other", "math-v1", "math-v2"}
    assert server.loaded["math-v2"] != old
    assert bits_of(Checkpoint(Path(server.loaded["math-v2"]) / WEIGHTS)) == bits_of(bundle_of(version(12), "math"))
    before = server.loaded["math-v2"]
    again.load(2, version(12), {CONFIG: FILES[CONFIG].replace(b"16", b"32")})  # alpha changes what the adapter computes
    assert server.loaded["math-v2"] != before


def test_an_adapter_that_another_client_has_unloaded_is_no_error(tmp_path: Path) -> None:
    server = Server()
    adapters = LoraAdapters(server, tmp_path)
    for number in (1, 2):
        adapters.load(number, version(number), FILES)
    load = server.load_adapter

    def load_and_unload(name: str, folder: str) -> None:
        load(name, folder)
        listed = server.adapters()
        server.adapters = lambda: dict(listed)  # type: ignore[method-assign]
        del server.loaded["math-v1"]

    server.load_adapter = load_and_unload  # type: ignore[method-assign]
    adapters.load(3, version(3), FILES)
    assert server.loaded.keys() == {"other", "math-v2", "math-v3"}


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
