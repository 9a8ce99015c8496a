"""Pages of named origins may use the gateway from a browser, and no others. The JavaScript in docs/live.md works in node and browsers."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import shutil
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import Scene, ask, gateway, serving, stored_feedback
from scripted_engine import ScriptedEngine
from tiny_policy import TinyPolicy

from deltawire.gateway.http.origins import check_origin
from deltawire.gateway.options import EngineAddress, GatewayOptions
from deltawire.store import Store

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dashboard"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

from markdown_blocks import blocks_run_by
from real_browser import Browser, browser, new_browser

__all__ = ["browser", "new_browser"]

APP, OTHER = "https://app.example", "https://other.example:8443"
KEY = "app"


@pytest.fixture
def engine(policy: TinyPolicy) -> Iterator[str]:
    with serving(ScriptedEngine(str(policy.first.seq)).serve) as url:
        yield url


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"app {hashlib.sha256(KEY.encode()).hexdigest()} all")
    return path


def options(scene: Scene, **headers: str) -> tuple[int, Any, dict[str, str]]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return ask(urllib.request.Request(f"{scene.url}/feedback", headers=named, method="OPTIONS"))


def cors(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("access-control") or name == "vary"}


def asked(origin: str) -> dict[str, str]:
    return {
        "origin": origin,
        "access_control_request_method": "POST",
        "access_control_request_headers": "authorization,content-type,x-stainless-lang",
    }


def test_pages_of_the_named_origins_may_ask_and_read(engine: str, store: Store, tmp_path: Path, keys: Path) -> None:
    with gateway(store, tmp_path, engine, keys=keys, origins=(APP, OTHER)) as scene:
        for origin in (APP, OTHER):
            status, body, headers = options(scene, **asked(origin))
            assert (status, body) == (204, b"")  # without a key
            exposed = "x-deltawire-inference-id, x-deltawire-version, x-deltawire-channel, x-deltawire-episode-id, retry-after"
            allowed = {"access-control-allow-origin": origin, "access-control-expose-headers": exposed, "vary": "origin"}
            assert cors(headers) == {
                **allowed,
                "access-control-allow-methods": "GET, POST",
                "access-control-allow-headers": "authorization,content-type,x-stainless-lang",
                "access-control-max-age": "600",
            }
            for stream in (False, True):
                status, _, headers = scene.chat(stream=stream, headers={"origin": origin, "authorization": f"Bearer {KEY}"})
                assert (status, cors(headers)) == (200, allowed)
            status, _, headers = scene.chat(headers={"origin": origin})
            assert (status, cors(headers)) == (401, allowed)  # the page may read why it was refused


@pytest.mark.parametrize(
    "origin", ["https://app.example.evil", "http://app.example", "https://app.example:444", "https://APP.example", "null", "*", ""]
)
def test_pages_of_other_origins_may_not(origin: str, engine: str, store: Store, tmp_path: Path) -> None:
    with gateway(store, tmp_path, engine, origins=(APP,)) as scene:
        status, _, headers = options(scene, **asked(origin))
        assert (status, cors(headers)) == (405, {"vary": "origin"})
        status, answer, headers = scene.chat(headers={"origin": origin})
        if origin:
            assert (status, answer["error"]["type"]) == (403, "OriginRefused")
        else:
            assert status == 200
        assert cors(headers) == {"vary": "origin"}
        status, answer, _ = scene.post("/feedback", {}, headers={"origin": origin, "content-type": "text/plain"})
        assert (status, answer["error"]["type"]) == ((403, "OriginRefused") if origin else (400, "RequestMalformed"))


def test_a_question_to_another_name_or_for_odd_headers_is_not_granted(engine: str, store: Store, tmp_path: Path) -> None:
    with gateway(store, tmp_path, engine, origins=(APP,)) as scene:
        assert options(scene, **asked(APP), host="evil.example")[0] == 405
        for odd in ("*", "a" * 10_000, "a;b", ","):
            status, _, headers = options(scene, **{**asked(APP), "access_control_request_headers": odd})
            assert status == 204
            assert "access-control-allow-headers" not in headers


def test_without_origins_there_is_no_header(engine: str, store: Store, tmp_path: Path) -> None:
    with gateway(store, tmp_path, engine) as scene:
        status, _, headers = options(scene, **asked(APP))
        assert (status, cors(headers)) == (405, {})
        assert cors(scene.chat(headers={"origin": APP})[2]) == {}


NO_ORIGINS = ["*", "null", "", "app.example", "https://", "https://*.example", "https://app.example/", "ftp://app.example"]
NO_ORIGINS += ["https://a:0", "https://app.example:443", "http://app.example:80", "https://u@app.example", "https://a\n"]


@pytest.mark.parametrize("text", NO_ORIGINS)
def test_what_is_no_origin_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an origin"):
        check_origin(text)
    with pytest.raises(ValueError, match="is not an origin"):
        GatewayOptions([EngineAddress("http://127.0.0.1:9")], origins=(text,))


def test_origins_are_those_that_browsers_send() -> None:
    assert check_origin("https://App.Example") == APP
    for text in (OTHER, "http://127.0.0.1:8080", "http://[::1]:80000"[:-1], "http://app.example:443"):
        assert check_origin(text) == text
    with pytest.raises(ValueError, match="in lower case"):
        GatewayOptions([EngineAddress("http://127.0.0.1:9")], origins=("https://App.Example",))


def line_of_the_page() -> str:
    (block,) = blocks_run_by("tests/gateway/test_browsers.py", "docs/live.md")
    return block.text.strip()


def stored_ids(store: Store) -> list[str | None]:
    return [one.inference for file in stored_feedback(store) for one in file.feedback]


def names(scene: Scene) -> tuple[str, str]:
    """Return an id, and the names that the line uses, as JavaScript."""
    _, answer, headers = scene.chat(headers={"authorization": f"Bearer {KEY}"})
    given = {"gateway": scene.url, "answer": {"id": answer["id"]}, "key": KEY}
    return headers["x-deltawire-inference-id"], "".join(f"const {name} = {json.dumps(value)};\n" for name, value in given.items())


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_line_for_feedback_works_in_node(engine: str, store: Store, tmp_path: Path, keys: Path) -> None:
    with gateway(store, tmp_path, engine, keys=keys) as scene:
        name, given = names(scene)
        script = f"{given}const {{ status }} = {line_of_the_page()};\nconsole.log(status);\n"
        ran = subprocess.run(["node", "--input-type=module", "-"], input=script, text=True, capture_output=True)
        assert (ran.returncode, ran.stdout.strip()) == (0, "200"), ran.stderr
    assert stored_ids(store) == [name]


class _Page(http.server.SimpleHTTPRequestHandler):
    """Serves one empty page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>An application</title>")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def page() -> Iterator[str]:
    """The origin of a page."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Page, directory="/")) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("is_named", [True, False])
def test_the_line_for_feedback_works_in_a_browser(
    is_named: bool, engine: str, store: Store, tmp_path: Path, keys: Path, browser: Browser, page: str
) -> None:
    with gateway(store, tmp_path, engine, keys=keys, origins=(page if is_named else APP,)) as scene:
        name, given = names(scene)
        browser.driver.get(f"{page}/{uuid.uuid4()}")
        script = f"const done = arguments[arguments.length - 1];\n{given}(async () => {line_of_the_page()})()"
        told = browser.driver.execute_async_script(f"{script}.then((found) => done(found.status), (error) => done(String(error)));")
        assert told == 200 if is_named else "TypeError" in told
        complaints = browser.complaints()
        assert is_named or any("CORS" in line for line in complaints)
    assert stored_ids(store) == ([name] if is_named else [])
