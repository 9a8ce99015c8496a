"""A small run for tests of what people see: a real chain, and the records of a fleet as its trainer and members would write them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from blake3 import blake3

import deltawire
from deltawire.chain.log import ChainLog
from deltawire.chain.records.pins import put_pin
from deltawire.chain.records.reports import put_report
from deltawire.format.records.fleet_files import Accepted, AcceptedResult
from deltawire.format.records.fleet_parts import AttemptId, ObjectRef
from deltawire.format.records.member_records import Heartbeat, Lease, LinkReport, UpdateReport
from deltawire.format.records.trainer_records import BatchRecord, Board, Round, Sampling
from deltawire.store import Store, fleet_keys, open_store

MARKUP = "<img src=x onerror=window.harmed=1><script>window.harmed=1</script>"
"""A text that does harm if a page reads it as HTML."""
LAYERS = 3


def first_weights() -> dict[str, Any]:
    """Return a small model with names like those of real ones, and one name with markup."""
    rng = np.random.default_rng(0)
    shapes = {f"model.layers.{layer}.{part}.weight": (32, 32) for layer in range(LAYERS) for part in ("mlp.up_proj", "self_attn.q_proj")}
    shapes |= {"model.embed_tokens.weight": (64, 32), f"model.{MARKUP}.weight": (8, 8)}
    return {name: rng.normal(size=shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}


class ShownRun:
    """Publishes versions and writes records of a fleet.

    `location` is a directory, or an open store.
    """

    def __init__(self, location: Path | Store, *, name: str = "shown run") -> None:
        self._weights = first_weights()
        self._rng = np.random.default_rng(1)
        self.store = open_store(str(location)) if isinstance(location, Path) else location
        self.publisher = deltawire.Publisher(self.store, run=name, attachments={"config.json": b"{}"})
        self.record = ChainLog(self.store).run
        self.step = 0
        self.seqs: list[int] = []
        self.publish()

    def publish(self, meta: Mapping[str, str] | None = None) -> Any:
        """Publish the next version: the bits of some weights, as integers, are one or four larger."""
        for array in self._weights.values():
            bits = array.reshape(-1).view(np.uint16)
            chosen = self._rng.choice(bits.size, size=max(2, bits.size // 20), replace=False)
            bits[chosen[: chosen.size // 2]] += 1
            bits[chosen[chosen.size // 2 :]] += 4
        numbers = {"reward": repr(0.1 + 0.01 * self.step), "mismatch_kl": repr(1e-5 * (1 + self.step % 3))}
        version = self.publisher.publish(self._weights, step=self.step, meta={**numbers, **(meta or {})})
        self.publisher.flush()
        self.step += 1
        self.seqs.append(version.seq)
        return version

    @property
    def id(self) -> str:
        return self.record.id

    def beat(self, member: str, **changes: Any) -> None:
        """Write a heartbeat."""
        fields: dict[str, Any] = {
            "state": "working",
            "seq": self.seqs[-1],
            "step": self.step - 1,
            "lag": 0,
            "tokens": 1000,
            "busy_ms": 2000,
            "working": (),
            "time": 0,
            "link": LinkReport(10_000_000, 12, 0),
            "behind_ms": 230,
            "engine": "vllm 0.32",
            "update": UpdateReport(fetch_us=40_000, verify_us=5_000, resolve_us=30_000, pause_us=2_500, total_us=90_000),
        }
        beat = Heartbeat(id=self.id, member=member, session="ab" * 16, **{**fields, **changes})
        self.store.put(fleet_keys.member_key(member), beat.to_bytes())

    def board(self, **changes: Any) -> None:
        fields = {
            "epoch": self.publisher.epoch,
            "seq": self.seqs[-1],
            "step": self.step - 1,
            "lease_seconds": 60,
            "offers": {},
            "stop": False,
        }
        self.store.put(fleet_keys.BOARD, Board(id=self.id, **{**fields, **changes}).to_bytes())

    def round(self, number: int, tasks: int) -> None:
        """Open a round for the next step."""
        rows = b'{"deltawire":"tasks","version":1,"tasks":[]}'
        digest = blake3(rows).hexdigest()
        ref = ObjectRef(fleet_keys.tasks_key(number, digest), len(rows), digest)
        oldest = max(0, self.step - 2)
        nonce = secrets.token_hex(16)
        record = Round(self.id, number, self.publisher.epoch, nonce, self.step, oldest, tasks, ref, 60, Sampling(1, 8), 0)
        self.store.put_if_absent(fleet_keys.round_key(number), record.to_bytes())

    def lease(self, number: int, task: int, member: str, *, attempt: int = 0) -> None:
        lease = Lease(self.id, number, task, attempt, member, secrets.token_hex(16), self.seqs[-1], 0)
        self.store.put_if_absent(fleet_keys.lease_key(AttemptId(number, task, attempt)), lease.to_bytes())

    def deliver(self, number: int, task: int, *, attempt: int = 0) -> fleet_keys.RolloutKey:
        """Put a result. Its bytes are of no interest to the dashboard, which only lists results."""
        data = f"{number} {task} {attempt}".encode()
        key = fleet_keys.RolloutKey(number, task, attempt, blake3(data).hexdigest())
        self.store.put(fleet_keys.rollout_key(key), data)
        return key

    def acknowledge(self, number: int, results: Mapping[str, fleet_keys.RolloutKey]) -> None:
        """Acknowledge results, by the names of their members."""
        listed = tuple(AcceptedResult(key.task, key.attempt, key.blake3, 1, member) for member, key in results.items())
        data = Accepted(number, listed).to_bytes()
        digest = blake3(data).hexdigest()
        ref = ObjectRef(fleet_keys.accepted_key(number, digest), len(data), digest)
        self.store.put(ref.key, data)
        now = int(time.time() * 1000)
        batch = BatchRecord(self.id, self.publisher.epoch, self.step, number, secrets.token_hex(16), ref, now)
        self.store.put_if_absent(fleet_keys.batch_key(self.publisher.epoch, self.step), batch.to_bytes())

    def pin(self, reader: str, seq: int) -> None:
        put_pin(self.store, self.record, reader, seq)

    def report(self, reader: str, state: str, error: str | None) -> None:
        put_report(self.store, self.record, reader, state, self.seqs[-1], error)

    def close(self) -> None:
        self.publisher.close()
        self.store.close()
