"""The trainer's process: it trains on request, publishes versions, and provides full weights and XOR deltas.

It reads lines of JSON, and answers each with one line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from peers import DenseXor

import deltawire
from deltawire.events import Event
from deltawire.store import Store, StoreOptions, open_store
from wan.emulated_stores import UPLOADS, TrainersStore
from wan.weights import BLOCK_BYTES, Block, publish_from, training

FULL, XOR, OBJECT = "full/block", "xor/block", "plain/object"
"""Keys of blocks of full weights, of their XOR deltas, and of other bytes. The first is fetched as often as the model has blocks."""
CORES = 2
"""Cores that encode and decode, for every method."""
_FULL_BLOCKS = 4
_Result = TypeVar("_Result")


class Trainer:
    """The weights, the version before them, and a publisher.

    Parameters
    ----------
    store
        The store for full weights and XOR deltas.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._new, self._baseline, self._previous = Block(), Block(), Block()
        self._steps = training(self._new)
        next(self._steps)
        self._publisher: deltawire.Publisher | None = None
        self._model: dict[str, Any] = {}
        self._published: tuple[float, dict[str, Any]] = (0.0, {})
        self._step = 0
        self._bytes = 0
        self._full_upload: float | None = None
        """Seconds in which a block of full weights was stored, together with others."""
        self._held: TrainersStore | None = None
        self._is_ahead = False
        self._ahead: list[int] = []
        """The bytes of versions that were encoded ahead and are not stored yet."""

    def open(self, url: str, copies: int, is_ahead: bool, writer: dict[str, Any]) -> dict[str, Any]:
        """Begin a run, whose first version every region has already. Its versions may be encoded ahead."""
        self.close()
        publish_from(self._baseline, copies)
        self._model = self._new.model(copies)
        self._held = TrainersStore(open_store(url), BLOCK_BYTES // 2)
        self._is_ahead, self._ahead = False, []
        options = deltawire.WriterOptions(skips=False, anchor_policy=deltawire.AnchorPolicy(min_versions=1000), **writer)
        self._publisher = deltawire.Publisher(self._held, "wan", attachments={}, options=options, on_event=self._note)
        self._step = 0
        self.publish()
        self._is_ahead = self._held.holds = is_ahead
        return {"block": str(self._baseline.path)}

    def train(self) -> dict[str, Any]:
        """Change the weights as a step of training does. If versions are encoded ahead, encode the next one."""
        np.copyto(self._previous.weights, self._new.weights)
        next(self._steps)
        if self._is_ahead:
            self._publish()
            self._ahead.append(self._bytes)
        return {}

    def publish(self) -> dict[str, Any]:
        """Publish the weights, or store the oldest version that was encoded ahead."""
        begin = time.monotonic()
        if self._is_ahead:
            assert self._held is not None
            self._held.release()
            return {"begin": begin, "published": time.monotonic(), "bytes": self._ahead.pop(0)}
        self._publish()
        published, fields = self._published
        phases = {key: value for key, value in fields.items() if key.endswith("_seconds")}
        return {"begin": begin, "published": published, "bytes": self._bytes, **phases}

    def _publish(self) -> None:
        assert self._publisher is not None
        self._bytes = self._publisher.publish(self._model, step=self._step).bytes
        self._step += 1

    def _note(self, event: Event) -> None:
        if event.name == "published":
            self._published = (time.monotonic(), dict(event.fields))

    def codecs(self) -> dict[str, Any]:
        """Encode and decode one block by deltawire and by XOR + zstd-1, each with `CORES` threads or as one of so many. Return seconds."""
        old, new = ({"block": block.weights} for block in (self._previous, self._new))
        encode, delta = _timed(lambda: deltawire.encode_delta(old, new, threads=CORES))
        decode, _ = _timed(lambda: deltawire.resolve_delta(old, delta, threads=CORES))
        before, after = (block.weights.view(np.uint16) for block in (self._previous, self._new))
        xor_encode, xor = _timed(lambda: DenseXor().encode(before, after))
        xor_decode, _ = _timed(lambda: DenseXor().apply(before, xor))
        DenseXor().apply(before, xor)  # as it was
        return {"encode": encode, "decode": decode, "xor_encode": xor_encode / CORES, "xor_decode": xor_decode / CORES}

    def full(self, copies: int) -> dict[str, Any]:
        """Store some blocks of full weights, once. The time of all of them is computed from that."""
        if self._full_upload is None:
            weights = self._new.weights.view(np.uint8).data
            self._full_upload = self._upload(FULL, [weights] * _FULL_BLOCKS) / _FULL_BLOCKS
        return {"key": f"{FULL}0", "size": BLOCK_BYTES, "upload": self._full_upload * copies}

    def objects(self, size: int) -> dict[str, Any]:
        """Store an object of the size of a file of a delta."""
        self._store.put(OBJECT, np.random.default_rng(0).bytes(size), size=size)
        return {"key": OBJECT, "size": size}

    def xor(self, copies: int) -> dict[str, Any]:
        """Store the XOR delta of the last step of training, once for each block of the model."""
        old, new = (block.weights.view(np.uint16) for block in (self._previous, self._new))
        seconds, delta = _timed(lambda: DenseXor().encode(old, new))
        upload = self._upload(XOR, [memoryview(delta)] * copies)
        return {"key": f"{XOR}0", "size": len(delta), "encode": seconds * copies / CORES, "upload": upload}

    def _upload(self, key: str, objects: list[memoryview]) -> float:
        """Store objects, as many at the same time as a publisher does. Return the seconds."""
        with ThreadPoolExecutor(UPLOADS) as pool:
            seconds, _ = _timed(
                lambda: list(pool.map(lambda each: self._store.put(f"{key}{each[0]}", each[1], size=len(each[1])), enumerate(objects)))
            )
        return seconds

    def close(self) -> dict[str, Any]:
        """End the run."""
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = None
        self._model = {}
        return {}


def _timed(work: Callable[[], _Result]) -> tuple[float, _Result]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def main() -> int:
    plain = os.environ["WAN_PLAIN_URL"]
    with open_store(plain, options=StoreOptions()) as store:
        trainer = Trainer(store)
        print(json.dumps({"pid": os.getpid()}), flush=True)
        for line in sys.stdin:
            message = json.loads(line)
            method: Callable[..., dict[str, Any]] = getattr(trainer, message.pop("do"))
            print(json.dumps(method(**message)), flush=True)
        trainer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
