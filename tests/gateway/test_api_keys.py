"""Every request is compared with all keys, in a way that tells nothing by its time."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest

from deltawire.errors import KeyRefused
from deltawire.gateway.http import api_keys
from deltawire.gateway.http.api_keys import ApiKeys

KEYS = [f"key-{number}" for number in range(40)]
WRONG = ["", "key-", "key-40", "key-0\n", "Key-0", hashlib.sha256(b"key-0").hexdigest(), "\xe9" * 9, "x" * 100_000]


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
