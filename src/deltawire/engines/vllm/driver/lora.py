"""LoRA adapters of a chain in a vLLM server, under the names of their versions.

A bundle NAME of version N becomes the adapter `NAME-vN`, in its own directory. Requests choose an adapter by its name, so several versions
serve side by side, and no pause is needed. vLLM keys its prefix cache by the name and directory of an adapter, so keys and values of one
version are never used for another.

**Which adapters stay.** The newest version and as many before it as rollouts may lag behind, and one more, which members may have been
told of last. Older ones are unloaded. So `--max-loras` must be at least the largest staleness + 2.

**Versions that also change the base model.** An adapter belongs to the base of its own version. `before_swap` unloads all adapters, then
the base is swapped, and `load` loads the new adapters. Requests that name an adapter are refused in between.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ....dtypes import dtype_of_numpy
from ....errors import EngineRefused
from ....events import OnEvent, emit
from ....format.bundle_names import MAIN, BundleView, bundle_names
from ....format.checkpoints.checkpoint import check_can_be_written
from ....format.digest import Digest
from ....format.safetensors_header import MalformedHeader, build_header, parse_json_object, place_in_order
from ....subscribe.delta_cache import PART
from ....subscribe.delta_spool import spool_errors
from ....tensors.state import state_digest
from .routes import RouteFailed

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The files of an adapter, as `peft` writes them."""

_BUNDLE = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,127}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_NOT_FOUND = 404
_SPARE = 2
"""Versions that stay loaded besides those that rollouts may lag behind: the newest, and the one before."""


class LoraServer(Protocol):
    """The routes of a server that adapters need. `VllmRoutes` has them."""

    def adapters(self) -> dict[str, str]: ...

    def load_adapter(self, name: str, folder: str) -> None: ...

    def unload_adapter(self, name: str) -> None: ...

    def most_adapters(self) -> int | None: ...


class LoraAdapters:
    """The adapters of one chain in one server. It keeps no state: the server and the directory tell which versions are loaded.

    Parameters
    ----------
    server
        The server.
    folder
        Where adapters are written, in the spool. The server must be able to read it.
    max_staleness
        How many versions old an adapter may be that requests still name.
    on_event
        Called with each event.
    """

    def __init__(self, server: LoraServer, folder: Path, *, max_staleness: int = 0, on_event: OnEvent | None = None) -> None:
        self._server = server
        self._folder = folder
        self._kept = max_staleness + _SPARE
        self._on_event = on_event

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
            name = adapter_name(bundle, version)
            names.append(name)
            if name in loaded and not (self._folder / name).is_dir():  # vLLM may read the directory again at any time
                self._unload_one(name)
                del loaded[name]
            if name not in loaded:
                folder = self._write(name, BundleView(state, bundle), _config(bundle, files))
                try:
                    self._server.load_adapter(name, str(folder))
                except RouteFailed as error:
                    raise EngineRefused(
                        f"the server does not load the LoRA adapter {name!r}: {error.message}",
                        hint="Start the server with --enable-lora, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and a sufficient --max-lora-rank.",
                    ) from error
                emit(self._on_event, "adapter-loaded", adapter=name, updates=version)
        self._unload(bundles, before=version - self._kept + 1)
        return names

    def before_swap(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Unload all adapters of the chain, because the base that they belong to is about to change.

        Parameters
        ----------
        state
            The tensors of a version, which tell the bundles.
        """
        self._unload([bundle for bundle in bundle_names(state) if bundle != MAIN], before=None)

    def _unload(self, bundles: Sequence[str], *, before: int | None) -> None:
        """Unload the versions of these bundles below a number, or all of them, and delete their directories."""
        found = (
            {*self._server.adapters(), *(path.name for path in self._folder.iterdir() if path.is_dir())} if self._folder.is_dir() else ()
        )
        loaded = self._server.adapters()
        for name in sorted(found):
            bundle, version = split_adapter_name(name.removesuffix(PART))  # also of a process that was killed while it wrote
            if bundle not in bundles or version is None or (before is not None and version >= before):
                continue
            if name in loaded:
                self._unload_one(name)
                emit(self._on_event, "adapter-unloaded", adapter=name, updates=version)
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def _unload_one(self, name: str) -> None:
        try:
            self._server.unload_adapter(name)
        except RouteFailed as error:
            if error.status != _NOT_FOUND:  # another client has unloaded it
                raise

    def _write(self, name: str, weights: Mapping[str, NDArray[Any]], config: bytes) -> Path:
        """Write an adapter as a directory, which is complete as soon as it has its name."""
        folder = self._folder / name
        arriving = self._folder / f"{name}{PART}"
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
        return folder


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


def base_digest(state: Mapping[str, NDArray[Any]]) -> Digest:
    """Return the digest of the main bundle. If it is that of the version before, only adapters have changed, and no swap is needed.

    Parameters
    ----------
    state
        The tensors of a version.
    """
    return state_digest(dict(BundleView(state)))


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
