"""Shows the codec on a model that this script makes: six optimizer steps, encoded as deltas and applied bit for bit.

`python examples/codec_demo.py` needs no network, no torch and no GPU, and takes a few seconds.
"""

from __future__ import annotations

import time

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import deltawire

LAYERS, WIDTH = 4, 1024
LEARNING_RATE = 1e-6
STEPS = 6


class Trainer:
    """Simulates an RL trainer with fp32 master weights, AdamW-sized updates and a bf16 policy."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        shapes = {"embed_tokens": (2048, WIDTH)}
        for layer in range(LAYERS):
            shapes |= {f"layers.{layer}.{name}": (WIDTH, WIDTH) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
            shapes |= {f"layers.{layer}.{name}": (3 * WIDTH, WIDTH) for name in ("gate_proj", "up_proj", "down_proj")}
        self.master = {name: self.random.standard_normal(shape, np.float32) * WIDTH**-0.5 for name, shape in shapes.items()}

    def step(self) -> None:
        for weights in self.master.values():
            weights += LEARNING_RATE * self.random.standard_normal(weights.shape, np.float32)

    def policy(self) -> dict[str, NDArray[ml_dtypes.bfloat16]]:
        return {name: weights.astype(ml_dtypes.bfloat16) for name, weights in self.master.items()}


def main() -> None:
    console = Console()
    trainer = Trainer()
    published = trainer.policy()
    rollout = {name: array.copy() for name, array in published.items()}  # the weights that a rollout engine serves
    full = sum(array.nbytes for array in published.values())
    console.print(
        f"A model of {full / 2e6:.0f} M bf16 weights, {full / 1e6:.0f} MB. AdamW-sized steps at learning rate {LEARNING_RATE:g}.\n"
    )

    table = Table("step", "changed", "delta", "bits each", "smaller", "encode", "apply", "follower", box=None, header_style="bold")
    shipped = 0
    for step in range(1, STEPS + 1):
        trainer.step()
        new = trainer.policy()
        start = time.perf_counter()
        delta = deltawire.encode_delta(published, new)
        encoded = time.perf_counter()
        deltawire.apply_delta(rollout, delta)
        applied = time.perf_counter()
        changed = sum(int(np.count_nonzero(published[name].view(np.uint16) != new[name].view(np.uint16))) for name in new)
        exact = all(np.array_equal(rollout[name].view(np.uint16), new[name].view(np.uint16)) for name in new)
        if not exact:
            raise SystemExit(f"step {step}: the follower differs from the trainer")
        table.add_row(
            str(step),
            f"{changed / (full / 2):.2%}",
            f"{len(delta) / 1e3:.0f} kB",
            f"{8 * len(delta) / changed:.2f}",
            f"{full / len(delta):.0f}×",
            f"{full / 1e9 / (encoded - start):.1f} GB/s",
            f"{full / 1e9 / (applied - encoded):.1f} GB/s",
            "[green]bit-identical[/green]",
        )
        shipped += len(delta)
        published = new
    console.print(table)
    digest = deltawire.state_digest(rollout)
    same = digest == deltawire.state_digest(published)
    console.print(f"\nShipped {shipped / 1e6:.2f} MB instead of {STEPS * full / 1e6:.0f} MB: {STEPS * full / shipped:.0f}× less.")
    console.print(f"State digest of trainer and follower: {digest} {'(equal)' if same else '(DIFFERENT)'}")

    damaged = bytearray(delta)
    damaged[len(damaged) // 2] ^= 1
    for what, attempt in {"the last delta a second time": bytes(delta), "a delta with one bit flipped": bytes(damaged)}.items():
        try:
            deltawire.apply_delta(rollout, attempt)
        except deltawire.DeltawireError as error:
            console.print(f"\nApplying {what} → [bold]{type(error).__name__}[/bold], and nothing has changed:\n  {error}", highlight=False)
    if deltawire.state_digest(rollout) != digest:
        raise SystemExit("a failed apply changed the state")


if __name__ == "__main__":
    main()
