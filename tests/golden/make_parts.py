"""Write the golden deltas of parts, of version 2: run `python tests/golden/make_parts.py`. They are made once.

parts/N.delta.safetensors is the delta of part N of the only tensor of the case `training_step`.
"""

from __future__ import annotations

from typing import Any

from make import HERE, training_step
from old_deltas import encode_old

from deltawire.tensors.bits import TensorPart

CUTS = [0, 4608, 8192, 9000]
NAME = "model.weight"


def part(state: dict[str, Any], number: int) -> dict[str, Any]:
    start, stop = CUTS[number : number + 2]
    return {NAME: TensorPart(state[NAME].reshape(-1)[start:stop], state[NAME].shape, start)}


def main() -> None:
    base, new, _ = training_step()
    for number in range(len(CUTS) - 1):
        (HERE / "parts" / f"{number}.delta.safetensors").write_bytes(encode_old(part(base, number), part(new, number)))


if __name__ == "__main__":
    main()
