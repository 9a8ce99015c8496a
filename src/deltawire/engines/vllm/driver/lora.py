"""LoRA adapters of a chain in a vLLM server, under the names of their versions.

A bundle NAME of version N becomes the adapter `NAME-vN`, in its own directory. Requests choose an adapter by its name, so several versions
serve side by side, and no pause is needed. vLLM keys its prefix cache by the name and directory of an adapter, so keys and values of one
version are never used for another.

**Which adapters stay.** The newest version and as many before it as rollouts may lag behind, and one more, which members may have been
told of last. Older ones are unloaded as soon as no request uses them. So `--max-loras` must be at least the largest staleness + 2.

**Directories.** vLLM reads the directory of an adapter again whenever a step needs an adapter that its workers have dropped: after a swap
of the base model, or because they hold too many. A step that does not find the directory ends the engine. So a directory never changes,
and is deleted only some time after the adapter was unloaded, when no request uses it. Its name has a hash of what is in it, so a version
of another run never gets the directory, or the prefix cache, of one with the same number.

**A swap of the base model** leaves adapters as they are: the workers drop their copies, and read them again for the next request.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ....dtypes import dtype_of_numpy
from ....errors import CheckpointError, EngineRefused
from ....events import OnEvent, emit
from ....format.bundle_names import MAIN, BundleView, bundle_names
from ....format.checkpoints.checkpoint import Checkpoint, check_can_be_written
from ....format.safetensors_header import MalformedHeader, build_header, parse_json_object, place_in_order
from ....subscribe.cache.delta_cache import PART
from ....subscribe.cache.private_folder import spool_errors
from ....tensors.state import state_digest
from .routes import RouteFailed

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The files of an adapter, as `peft` writes them."""

_BUNDLE = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,127}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_FOLDER = re.compile(r"(?P<adapter>.+)\.[0-9a-f]{16}")
_NOT_FOUND = 404
_SETTLE_SECONDS = 30.0
"""Seconds for which a directory stays after its adapter was unloaded: a request that named it before may just be on its way."""
_MOST_UNKNOWN = 8
"""The number of directories that stay if the server does not tell which ones its requests use."""
_SPARE = 2
"""Versions that stay loaded besides those that rollouts may lag behind: the newest, and the one before."""


class LoraServer(Protocol):
    """The routes of a server that adapters need. `VllmRoutes` has them."""

    def adapters(self) -> dict[str, str]: ...

    def load_adapter(self, name: str, folder: str) -> None: ...

    def unload_adapter(self, name: str) -> None: ...

    def most_adapters(self) -> int | None: ...

    def used_adapters(self) -> Collection[str] | None: ...


class LoraAdapters:
    """The adapters of one chain in one server. The server and the directory tell which versions are loaded.

    Parameters
    ----------
    server
        The server.
    folder
        Where adapters are written. The server must be able to read it, and no other server may use it.
    max_staleness
        How many versions old an adapter may be that requests still name.
    on_event
        Called with each event.
    clock
        For tests.
    """

    def __init__(
        self,
        server: LoraServer,
        folder: Path,
        *,
        max_staleness: int = 0,
        on_event: OnEvent | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._folder = folder.absolute()
        self._kept = max_staleness + _SPARE
        self._on_event = on_event
        self._clock = clock
        self._unloaded: dict[Path, float] = {}
        """The directories of adapters that are not loaded, and since when this is known."""

    def check(self) -> None:
        """Raise `EngineRefused` if the server cannot hold as many versions of an adapter as are needed."""
        most = self._server.most_adapters()
        if most is not None and most < self._kept:
            raise EngineRefused(
                f"the server can use {most} LoRA adapters at the same time, but {self._kept} versions of an adapter must stay loaded.",
                hint=f"Start it with --max-loras {self._kept} or more, or allow less staleness.",
            )

    def load(self, version: int, state: Mapping[str, NDArray[Any]], files: Mapping[str, bytes]) -> list[str]:
        """Load the adapters of a version, and unload versions that are too old. Returns the names of the new adapters.

        Adapters that are loaded already are left alone. Raises `EngineRefused` if a bundle is not an adapter that this server can load,
        and `SpoolError` if it cannot be written. Then adapters of earlier versions stay.

        Parameters
        ----------
        version
            The number of the version, `Version.updates`.
        state
            The tensors of the version. All bundles except the main one are adapters.
        files
            The attachments of the version. The config of bundle NAME is `adapter_config-NAME.json`, or `adapter_config.json`.
        """
        bundles = [bundle for bundle in bundle_names(state) if bundle != MAIN]
        loaded = self._server.adapters()
        names = []
        for bundle in bundles:
            name, weights, config = adapter_name(bundle, version), BundleView(state, bundle), _config(bundle, files)
            names.append(name)
            folder = self._folder / f"{name}.{_hash(weights, config)}"
            if name in loaded and (loaded[name] != str(folder) or not folder.is_dir()):  # of another run, or it cannot be read again
                self._unload_one(name)
                del loaded[name]
            if name not in loaded:
                if not _holds(folder, weights, config):
                    self._write(folder, weights, config)
                try:
                    self._server.load_adapter(name, str(folder))
                except RouteFailed as error:
                    raise EngineRefused(
                        f"the server does not load the LoRA adapter {name!r}: {error.message}",
                        hint="Start the server with --enable-lora, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and a sufficient --max-lora-rank.",
                    ) from error
                emit(self._on_event, "adapter-loaded", adapter=name, updates=version)
        self.tidy(bundles, version)
        return names

    def tidy(self, bundles: Collection[str], version: int) -> None:
        """Unload versions that are too old and that no request uses, and delete directories that nothing needs now.

        Parameters
        ----------
        bundles
            The bundles whose adapters are looked at. Those of others stay.
        version
            The number of the newest version, which stays.
        """
        loaded = {name: folder for name, folder in self._server.adapters().items() if split_adapter_name(name)[0] in bundles}
        old = [each for bundle in bundles for each in self._too_old(loaded, bundle, version)]
        folders = self._folders(bundles)
        if not old and folders <= set(map(Path, loaded.values())):
            return
        used = self._server.used_adapters()
        for name, number in old:
            if used is None or loaded[name] not in used:  # a running request is not affected, but its next turn may name it too
                self._unload_one(name)
                del loaded[name]
                emit(self._on_event, "adapter-unloaded", adapter=name, updates=number)
        self._delete(folders - set(map(Path, loaded.values())), used)

    def _too_old(self, loaded: Mapping[str, str], bundle: str, version: int) -> list[tuple[str, int]]:
        """Return the adapters of a bundle that need not stay. Higher numbers than the newest one are of an earlier run."""
        numbers = {name: number for name in loaded for each, number in [split_adapter_name(name)] if each == bundle and number is not None}
        newest_first = sorted(numbers, key=lambda name: (numbers[name] <= version, numbers[name]), reverse=True)
        return [(name, numbers[name]) for name in newest_first[self._kept :]]

    def _delete(self, unneeded: Collection[Path], used: Collection[str] | None) -> None:
        now = self._clock()
        self._unloaded = {folder: self._unloaded.get(folder, now) for folder in unneeded}
        newest_first = sorted(self._unloaded, key=lambda folder: (self._unloaded[folder], folder.name), reverse=True)
        for number, folder in enumerate(newest_first):
            has_settled = now - self._unloaded[folder] >= _SETTLE_SECONDS
            if number >= _MOST_UNKNOWN if used is None else has_settled and str(folder) not in used:
                shutil.rmtree(folder, ignore_errors=True)

    def _folders(self, bundles: Collection[str]) -> set[Path]:
        """Return the directories of adapters. Deletes what a process that was killed has left half-written."""
        found: set[Path] = set()
        with contextlib.suppress(FileNotFoundError):
            for path in self._folder.iterdir():
                match = _FOLDER.fullmatch(path.name.removesuffix(PART))
                if match is None or split_adapter_name(match["adapter"])[0] not in bundles:
                    continue
                if path.name.endswith(PART):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    found.add(path)
        return found

    def _unload_one(self, name: str) -> None:
        try:
            self._server.unload_adapter(name)
        except RouteFailed as error:
            if error.status != _NOT_FOUND:  # another client has unloaded it
                raise

    def _write(self, folder: Path, weights: Mapping[str, NDArray[Any]], config: bytes) -> None:
        """Write an adapter as a directory, which is complete as soon as it has its name."""
        arriving = folder.with_name(f"{folder.name}{PART}")
        with spool_errors(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for old in (arriving, folder):
                shutil.rmtree(old, ignore_errors=True)
            arriving.mkdir()
            (arriving / CONFIG).write_bytes(config)
            placed = place_in_order([(each, dtype_of_numpy(array.dtype), array.shape) for each, array in sorted(weights.items())])
            with (arriving / WEIGHTS).open("wb") as file:
                file.write(build_header(placed, {"format": "pt"}))
                for each, _ in placed:
                    file.write(np.ascontiguousarray(weights[each]).reshape(-1).view(np.uint8).data)
            os.rename(arriving, folder)


def adapter_name(bundle: str, version: int) -> str:
    """Return the name of an adapter in the server. Raises `EngineRefused` if the bundle's name cannot be part of one.

    Parameters
    ----------
    bundle
        The name of the bundle.
    version
        The number of the version, `Version.updates`.
    """
    name = f"{bundle}-v{version}"
    if _BUNDLE.fullmatch(bundle) is None or bundle in (".", ".."):
        raise EngineRefused(
            f"the bundle {bundle!r} cannot name a LoRA adapter.", hint="Use letters, digits, dots, hyphens and underscores."
        )
    check_can_be_written(name)
    return name


def split_adapter_name(name: str) -> tuple[str, int | None]:
    """Return the bundle and the version of an adapter. The version is None for names of another form.

    Parameters
    ----------
    name
        The name of an adapter in the server.
    """
    bundle, separator, number = name.rpartition("-v")
    is_number = bool(separator) and _NUMBER.fullmatch(number) is not None
    return (bundle, int(number)) if is_number else (name, None)


def _hash(weights: Mapping[str, NDArray[Any]], config: bytes) -> str:
    """Return a hash of an adapter: of its weights, and of its config, which also changes what it computes."""
    return blake3(state_digest(dict(weights)).hex().encode() + config).hexdigest()[:16]


def _holds(folder: Path, weights: Mapping[str, NDArray[Any]], config: bytes) -> bool:
    """Return whether a directory holds exactly this adapter. An earlier process may have written it."""
    try:
        return (folder / CONFIG).read_bytes() == config and state_digest(Checkpoint(folder / WEIGHTS)) == state_digest(dict(weights))
    except (OSError, CheckpointError):
        return False


def _config(bundle: str, files: Mapping[str, bytes]) -> bytes:
    """Return the config of an adapter. Raises `EngineRefused` if there is none, or if it is not one."""
    own = f"adapter_config-{bundle}.json"
    found = files.get(own, files.get(CONFIG))
    if found is None:
        raise EngineRefused(
            f"bundle {bundle!r} has no config: the version has neither {own} nor {CONFIG}.",
            hint="Publish it as an attachment (`deltawire.trainers.adapter_files`).",
        )
    try:
        document = parse_json_object(found)
    except MalformedHeader as error:
        raise EngineRefused(f"the config of bundle {bundle!r} cannot be used: {error}", hint="Publish it again.") from None
    if document.get("peft_type") != "LORA" or type(document.get("r")) is not int or document["r"] < 1:
        raise EngineRefused(f"the config of bundle {bundle!r} does not describe a LoRA adapter.", hint="Publish it again.")
    return json.dumps(document).encode()
