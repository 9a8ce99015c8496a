"""Write the golden deltas of parts: run `python tests/golden/make_parts.py`. Like those of make.py they are made once and stay readable.

parts/N.delta.safetensors is the delta of part N of the only tensor of the case `training_step`.
"""

from __future__ import annotations

from typing import Any

from make import HERE, training_step

import deltawire
from deltawire.tensors.bits import TensorPart

CUTS = [0, 4608, 8192, 9000]
NAME = "model.weight"


def part(state: dict[str, Any], number: int) -> dict[str, Any]:
    start, stop = CUTS[number : number + 2]
    return {NAME: TensorPart(state[NAME].reshape(-1)[start:stop], state[NAME].shape, start)}


def main() -> None:
    base, new, _ = training_step()
    for number in range(len(CUTS) - 1):
        (HERE / "parts" / f"{number}.delta.safetensors").write_bytes(deltawire.encode_delta(part(base, number), part(new, number)))


if __name__ == "__main__":
    main()
