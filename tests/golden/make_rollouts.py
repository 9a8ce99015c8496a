"""Write the golden files of rollouts: run `python tests/golden/make_rollouts.py`. They are made once.

rollouts/plain.safetensors is of version 1, without routing. rollouts/routed.safetensors is of version 2. experts.npy are its rows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from deltawire import Digest
from deltawire.format.rollouts import ClaimedVersion, Completion, Rollouts, TokenSpan, sequences_of
from deltawire.format.routing import Routing, RoutingLayout

FOLDER = Path(__file__).parent / "rollouts"
LAYOUT = RoutingLayout(128, 8, (1, 2, 3))


def rollouts() -> tuple[Rollouts, list[np.ndarray]]:
    chance = np.random.default_rng(17)
    prompts = tuple(chance.integers(0, 9, length).astype(np.int32) for length in (7, 3))
    completions = tuple(
        Completion(
            prompt=prompt,
            tokens=chance.integers(0, 9, length).astype(np.int32),
            logprobs=-chance.random(length).astype(np.float32),
            mask=np.ones(length, np.uint8),
            rewards=(float(length),),
            spans=(TokenSpan(0, 2, 4), TokenSpan(2, length, 6)),
            finished=bool(length % 2),
        )
        for prompt, length in ((0, 12), (0, 9), (1, 40))
    )
    versions = {4: ClaimedVersion(1, Digest((1, 2, 3, 4))), 6: ClaimedVersion(2, Digest((5, 6, 7, 8)))}
    whole = Rollouts("ab" * 16, 1, 2, 3, "golden", "cd" * 16, prompts, completions, ("length",), versions, {"generate": 0.5})
    homes = np.argsort(chance.random((9, 3, 128)), -1)
    sequences = sequences_of(prompts, completions)
    rows = homes[sequences.tokens]
    for row in rows.reshape(-1, 128):
        row[:3] = row[chance.integers(0, 128, 1) + np.arange(3) - 128]
    experts = np.split(np.ascontiguousarray(rows[..., :8]).astype(np.int16), sequences.starts[1:-1])
    experts[1][:7] = experts[0][:7]
    experts[2][5, 1] = 0
    for each in experts:
        each[-1] = -1
    return whole, experts


def main() -> None:
    whole, experts = rollouts()
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "plain.safetensors").write_bytes(whole.to_bytes())
    routing = Routing.encode(LAYOUT, sequences_of(whole.prompts, whole.completions), experts)
    (FOLDER / "routed.safetensors").write_bytes(replace(whole, routing=routing).to_bytes())
    np.save(FOLDER / "experts.npy", np.concatenate(routing.experts()))


if __name__ == "__main__":
    main()
