"""Every request is compared with all keys, in a way that tells nothing by its time."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

import pytest
from gateway_scene import gateway, serving
from scripted_engine import ScriptedEngine
from tiny_policy import TinyPolicy

from deltawire.errors import KeyRefused, UnusableKeys
from deltawire.gateway import EngineAddress, GatewayOptions, serve_gateway
from deltawire.gateway.http import api_keys
from deltawire.gateway.http.api_keys import ApiKeys
from deltawire.store import Store

KEYS = [f"key-{number}" for number in range(40)]
WRONG = ["", "key-", "key-40", "key-0\n", "Key-0", hashlib.sha256(b"key-0").hexdigest(), "\xe9" * 9, "x" * 100_000]


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.mark.parametrize("given", [*KEYS, *WRONG], ids=lambda given: given[:12])
def test_all_keys_are_compared_whichever_fits(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text("\n".join(f"caller-{key} {hashlib.sha256(key.encode()).hexdigest()}" for key in KEYS))
    keys = ApiKeys.read(path)
    honest, compared = hmac.compare_digest, []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return honest(one, other)

    monkeypatch.setattr(api_keys.hmac, "compare_digest", compare)
    if given in KEYS:
        assert keys.caller({"authorization": f"Bearer {given}"}).name == f"caller-{given}"
    else:
        with pytest.raises(KeyRefused):
            keys.caller({"authorization": f"Bearer {given}"})
    digest = hashlib.sha256(given.encode("latin-1")).digest()
    assert [one for one, _ in compared] == [hashlib.sha256(key.encode()).digest() for key in KEYS]
    assert {other for _, other in compared} == {digest}  # keys of any length are compared as hashes


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_may_have_any_case(scheme: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"app {digest_of('key')}")
    keys = ApiKeys.read(tmp_path / "keys")
    assert keys.caller({"authorization": f"{scheme} key"}).name == "app"
    with pytest.raises(KeyRefused):
        keys.caller({"authorization": f"{scheme} bearer key"})


SECRET = "sk-in-clear-text"
WRONG_LINES = {
    f"{digest_of('key')}  -": "word 1 must be the name of the caller, and it is a hash",
    f"a/b {digest_of('key')}": "word 1 must be a name .* and it is 'a/b'",
    "app": "word 2, the SHA-256 of the key, is missing",
    f"app {SECRET}": "word 2 must be the SHA-256 of the key, .* has 16 characters",
    f"app {digest_of('')}": "word 2 is the SHA-256 of an empty key",
    f"app {digest_of('key')}  -": "word 3 must be 'feedback' or 'all', and it is '-'",
    f"app {digest_of('key')} all feedbak": "word 4 must be 'feedback' or 'all', and it is 'feedbak'",
    f"app {digest_of('first')}": "has the key of line 1",
}


@pytest.mark.parametrize("line", WRONG_LINES, ids=range(len(WRONG_LINES)))
def test_a_file_that_cannot_be_used_says_which_word_is_wrong_before_anything_starts(line: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"first {digest_of('first')}\n# a comment\n{line}\n")
    options = GatewayOptions([EngineAddress("http://127.0.0.1:9")], keys=path, journal=tmp_path / "journal")
    with pytest.raises(UnusableKeys, match=f"line 3 of .*keys.*{WRONG_LINES[line]}") as caught:
        serve_gateway(tmp_path / "no chain", options)
    assert SECRET not in str(caught.value)
    assert not (tmp_path / "journal").exists()


@pytest.mark.parametrize("data", [b"", b"# nobody\n\n", b"app \xff"], ids=["empty", "comment", "no text"])
def test_a_file_without_keys_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(data)
    with pytest.raises(UnusableKeys, match="keys"):
        ApiKeys.read(tmp_path / "keys")


def test_a_caller_with_two_keys_rates_its_answers_and_one_that_has_none_is_told_why(
    policy: TinyPolicy, store: Store, tmp_path: Path
) -> None:
    lines = {"alice server": "", "alice page": "feedback", "page only": "feedback", "judge key": "feedback all"}
    (tmp_path / "keys").write_text("\n".join(f"{name.split()[0]} {digest_of(name)} {rights}" for name, rights in lines.items()))
    with (
        serving(ScriptedEngine(str(policy.first.seq)).serve) as engine,
        gateway(store, tmp_path, engine, keys=tmp_path / "keys") as scene,
    ):
        headers = {name: {"authorization": f"Bearer {name}"} for name in lines}
        answer = scene.chat(headers=headers["alice server"])[1]["id"]
        body = {"inference_id": answer, "metric_name": "thumbs", "value": True}
        assert [scene.post("/feedback", body, headers[name])[0] for name in lines] == [200, 200, 404, 200]
        assert "a key without the word `feedback`" in scene.chat(headers=headers["page only"])[1]["error"]["message"]
        reason = scene.post("/feedback", body, headers["page only"])[1]["error"]["message"]
        assert "No answer belongs to the caller page, because its keys are only for feedback." in reason
        warned = [event.fields["caller"] for event in scene.events if event.name == "caller-without-answers"]
        assert warned == ["page"]
        unknown = {**body, "inference_id": "0190a0b0-c0d0-7000-8000-000000000001"}
        assert "only for feedback" not in scene.post("/feedback", unknown, headers["alice page"])[1]["error"]["message"]


def test_the_file_on_the_page_is_accepted(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/live.md").read_text(encoding="utf-8")
    found = re.search(r"^```text\n(alice .*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    (tmp_path / "keys").write_text(found[1])
    keys = ApiKeys.read(tmp_path / "keys")
    assert keys.can_rate_nothing == []
    assert keys.caller({"authorization": "Bearer key of alice's page"}).name == "alice"
