"""SGLang servers, through their HTTP routes: pause, load from a mirror directory, check the version, continue.

SGLang has no build for CPUs, so this adapter **was not run against a real server**. It is tested against a recorded contract, which was
read from SGLang's source (tests/engines/sglang_contract.json names the commit). The server must see the mirror's directory under the same
path. It names its model after the path that it has loaded last.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..chain.version import Version
from ..errors import EngineError, EngineUnavailable
from .base import KvCache
from .disk import DiskEngine
from .http_session import NoAnswer, http_session


class SglangEngine(DiskEngine):
    """A running SGLang server. Its `weight_version` is set to the number of the commit that it has loaded.

    With `KvCache.KEEP`, requests in progress continue with their caches. Otherwise they go back to the queue and are computed again.

    Parameters
    ----------
    url
        The address of the server.
    mirror
        The directory of the mirror, which the server must see under the same path.
    api_key
        The server's key, if it has one.
    admin_api_key
        The server's key for administrators, if it has one. None means `api_key`.
    timeout
        Seconds that loading a version may take.
    loaded_seq
        The `Version.seq` of the version that the server was started with, if it was loaded from the mirror.
    threads
        Number of threads for updating the mirror. None means one per core.
    name
        The name of the engine in messages and events.
    """

    def __init__(
        self,
        url: str,
        mirror: Path | str,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        timeout: float = 600.0,
        loaded_seq: int | None = None,
        threads: int | None = None,
        name: str = "sglang",
    ) -> None:
        super().__init__(
            mirror,
            self._load,
            pause=self._stop,
            resume=lambda: self._call("/continue_generation", {}),
            confirm=self._check,
            loaded_seq=loaded_seq,
            threads=threads,
            name=name,
        )
        self._url = url.rstrip("/")
        self._user_key, self._admin_key = api_key, admin_api_key or api_key
        self._timeout = timeout
        self._kv_cache = KvCache.DROP

    def _stop(self, kv_cache: KvCache) -> None:
        self._kv_cache = kv_cache
        self._call("/pause_generation", {"mode": "in_place" if kv_cache is KvCache.KEEP else "retract"})

    def _load(self, path: Path, version: Version) -> None:
        answer = self._call(
            "/update_weights_from_disk",
            {
                "model_path": str(path.resolve()),
                "weight_version": str(version.seq),
                "flush_cache": self._kv_cache is not KvCache.KEEP,
                "keep_pause": True,
            },
        )
        if not answer.get("success"):
            raise EngineError(f"{self.name} did not load {version.describe()}: {answer.get('message')}")

    def _check(self, version: Version) -> None:
        found = self._call("/model_info").get("weight_version")
        if found != str(version.seq):
            raise EngineError(f"{self.name} reports that it has commit {found}, not {version.seq}.")

    def _call(self, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        key = self._user_key if body is None else self._admin_key  # changing the server needs the administrator's key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            with http_session(self._url) as session:
                answer = session.ask("GET" if body is None else "POST", route, body, headers=headers, timeout=self._timeout)
        except NoAnswer as error:
            raise EngineUnavailable(f"{error}.") from error
        if not 200 <= answer.status < 300:
            raise EngineError(f"{self._url}{route} answered {answer.status}: {answer.text}")
        try:
            found = json.loads(answer.content)
        except ValueError:
            return {}  # some routes answer with plain text
        return found if isinstance(found, dict) else {}
