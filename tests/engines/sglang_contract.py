"""A server that answers SGLang's weight routes as its source says (http_server.py, io_struct.py), since SGLang does not run on CPUs.

`/pause_generation {mode}`, `/continue_generation`, `/update_weights_from_disk {model_path, weight_version, flush_cache, keep_pause, …}`
(400 and `success: false` if it fails), `/get_weight_version`. With `in_place`, flushing the cache fails while requests run.
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
from deltawire.engines.forward_gate import ForwardGate

MODES = {"abort", "retract", "in_place"}
FIELDS = {
    "model_path",
    "load_format",
    "abort_all_requests",
    "weight_version",
    "is_async",
    "torch_empty_cache",
    "keep_pause",
    "recapture_cuda_graph",
    "token_step",
    "flush_cache",
    "manifest",
}


class SglangContract:
    """One server with weights. `log` is what it was asked, `broken` makes the next reloads fail."""

    def __init__(self, weights: Mapping[str, Any], api_key: str | None = None) -> None:
        self.weights = dict(weights)
        self.weight_version = "default"
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.broken = 0
        self.requests_running = 1
        self._api_key = api_key
        self._mode: str | None = None
        self._gate = ForwardGate()
        handler = type("Handler", (_Handler,), {"contract": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def generate(self) -> bytes:
        self._gate.enter()
        try:
            return b"".join(self.weights[name].tobytes() for name in sorted(self.weights))
        finally:
            self._gate.leave()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, route: str, body: dict[str, Any], key: str | None) -> tuple[int, Any]:
        if self._api_key is not None and key != f"Bearer {self._api_key}":
            return 401, {"error": "Unauthorized"}
        self.log.append((route, body))
        if route == "/pause_generation":
            if body.get("mode", "abort") not in MODES:
                return 400, {"message": "Invalid mode"}
            self._mode = body.get("mode", "abort")
            self._gate.close(KvCache.KEEP, 60)
            return 200, {"message": "Generation paused successfully.", "status": "ok"}
        if route == "/continue_generation":
            self._gate.open()
            return 200, {"message": "Generation continued successfully.", "status": "ok"}
        if route == "/get_weight_version":
            return 200, {"weight_version": self.weight_version}
        if route == "/update_weights_from_disk":
            return self._update(body)
        return 404, {"detail": "Not Found"}

    def _update(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert body.keys() <= FIELDS
        failure = None
        if self.broken:
            self.broken -= 1
            failure = "Failed to update weights: out of memory."
        elif body.get("flush_cache", True) and self._mode == "in_place" and self.requests_running:
            failure = "Cache flush failed after updating weights"
        if failure is not None:
            return 400, {"success": False, "message": failure, "num_paused_requests": 0}
        for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
            self.weights.update(load_file(file))
        if body.get("weight_version") is not None:
            self.weight_version = body["weight_version"]
        if not body.get("keep_pause"):
            self._gate.open()
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


class _Handler(BaseHTTPRequestHandler):
    contract: SglangContract

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self._reply(*self.contract.answer(self.path, body, self.headers.get("Authorization")))

    def do_GET(self) -> None:
        self._reply(*self.contract.answer(self.path, {}, self.headers.get("Authorization")))

    def _reply(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass
