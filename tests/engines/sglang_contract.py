"""Run a server that answers SGLang's weight routes as sglang_contract.json records them, because SGLang does not run on CPUs.

Every request must match the record exactly: any other route, method, field or type fails the request, and so do answers
of this server that do not have the recorded shape. The server follows the rules that the record states in words (`rules`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from deltawire.engines import KvCache
from deltawire.engines.swap.forward_lock import ForwardLock

CONTRACT = json.loads(Path(__file__).with_suffix(".json").read_text())
_TYPES = {"string": str, "boolean": bool, "integer": int, "object": dict}


class SglangContract:
    """A server with weights. `log` lists the requests, `broken` makes the next reloads fail, `breaches` lists breaches of the contract."""

    def __init__(self, weights: Mapping[str, Any], api_key: str | None = None, admin_api_key: str | None = None) -> None:
        self.weights = dict(weights)
        self.weight_version = "default"
        self.model_path = "/models/first"
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.breaches: list[str] = []
        self.broken = 0
        self.requests_running = 1
        self._keys = {"user": api_key, "admin": admin_api_key or api_key}
        self._mode: str | None = None
        self._forward_lock = ForwardLock()
        handler = type("Handler", (_Handler,), {"contract": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def generate(self) -> bytes:
        self._forward_lock.enter()
        try:
            return b"".join(self.weights[name].tobytes() for name in sorted(self.weights))
        finally:
            self._forward_lock.leave()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, method: str, route: str, body: dict[str, Any], key: str | None) -> tuple[int, Any]:
        recorded = CONTRACT["routes"].get(route)
        if recorded is None or recorded["method"] != method:
            return self._breach(f"{method} {route} is not recorded")
        wanted = self._keys[recorded["key"]]
        if wanted is not None and key != f"Bearer {wanted}":
            return 401, {"error": "Unauthorized"}
        if wrong := _misfits(body, recorded["request"]):
            return self._breach(f"{route}: {wrong}")
        self.log.append((route, body))
        status, content = self._do(route, {name: field.get("default") for name, field in recorded["request"].items()} | body)
        shape = recorded["answers"][str(status)]
        assert content.keys() == shape.keys()
        assert all(isinstance(content[name], _TYPES[kind]) for name, kind in shape.items())
        return status, content

    def _breach(self, what: str) -> tuple[int, Any]:
        self.breaches.append(what)
        return 422, {"detail": what}

    def _do(self, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if route == "/pause_generation":
            self._mode = body["mode"]
            self._forward_lock.acquire(KvCache.KEEP, 60)
            return 200, {"message": "paused", "status": "ok"}
        if route == "/continue_generation":
            self._forward_lock.release()
            return 200, {"message": "continues", "status": "ok"}
        if route == "/model_info":
            return 200, {"model_path": self.model_path, "served_model_name": self.model_path, "weight_version": self.weight_version}
        if route == "/update_weights_from_disk":
            return self._update(body)
        return 404, {"detail": "gone"}

    def _update(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        failure = None
        if self.broken:
            self.broken -= 1
            failure = "out of memory"
        else:
            for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
                self.weights.update(load_file(file))
            if body["flush_cache"] and self._mode == "in_place" and self.requests_running:
                failure = "the cache is in use"
        if failure is not None:
            return 400, {"success": False, "message": failure, "num_paused_requests": 0}
        self.model_path = body["model_path"]
        if body["weight_version"] is not None:
            self.weight_version = body["weight_version"]
        return 200, {"success": True, "message": "loaded", "num_paused_requests": 0}


def _misfits(body: Mapping[str, Any], fields: Mapping[str, Any]) -> str | None:
    """Return how a request breaks the contract, or None."""
    for name, field in fields.items():
        if field.get("required") and name not in body:
            return f"{name} is missing"
    for name, value in body.items():
        if name not in fields:
            return f"there is no field {name}"
        field = fields[name]
        if type(value) is not _TYPES[field["type"]] or value not in field.get("values", [value]):
            return f"{name} cannot be {value!r}"
    return None


class _Handler(BaseHTTPRequestHandler):
    contract: SglangContract

    def do_POST(self) -> None:
        self._reply("POST", json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}"))

    def do_GET(self) -> None:
        self._reply("GET", {})

    def _reply(self, method: str, body: dict[str, Any]) -> None:
        status, content = self.contract.answer(method, self.path, body, self.headers.get("Authorization"))
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass
