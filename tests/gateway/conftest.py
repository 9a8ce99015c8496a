"""A tiny policy, its chain, and a real engine that serves it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("aiohttp", reason="aiohttp is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fleet"))

from gateway_scene import Scene, gateway, serving
from tiny_policy import TinyPolicy

from deltawire.store import Store, open_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def policy(tmp_path: Path, store: Store) -> Iterator[TinyPolicy]:
    made = TinyPolicy(tmp_path, store)
    made.first = made.publish(0)
    yield made
    made.publisher.close()


@pytest.fixture
def engine(policy: TinyPolicy, store: Store) -> Iterator[str]:
    """The address of a server with the real model."""
    from deltawire.rl.serving.openai_server import serve_openai

    with serving(serve_openai, store, poll=0.02) as url:
        yield url


@pytest.fixture
def scene(engine: str, store: Store, tmp_path: Path) -> Iterator[Scene]:
    with gateway(store, tmp_path, engine) as made:
        yield made
