"""Write the golden deltas of version 3: run `python tests/golden/make_groups.py` with `tests` on the path.

groups/NAME.delta is the delta of a case of make.py or of this file; groups/NAME.base.safetensors is the base of the latter.
groups/part-N.delta is the delta of part N of the only tensor of the case `training_step`. groups/manifest.json records the results.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from blake3 import blake3
from make import CASES, HERE, Pair, facts, generator, training_step, weights, write_state
from make_parts import CUTS, part

import deltawire
from deltawire.dtypes import dtype_named

GROUPS = HERE / "groups"
MANIFEST = GROUPS / "manifest.json"


def packed_codes() -> Pair:
    """Return 4-bit codes packed into bytes and 32-bit integers. Some change by one step, and those of one tensor all change."""
    words = generator(5)
    base: dict[str, Any] = {
        "a.weight_packed": (words(300) >> np.uint64(56)).astype(np.uint8).reshape(20, 15),
        "b.weight_packed": (words(90) >> np.uint64(32)).astype(np.uint32).view(np.int32).reshape(9, 10),
        "c_blocks": (words(64) >> np.uint64(56)).astype(np.uint8),
        "d.weight_packed": (words(40) >> np.uint64(56)).astype(np.uint8).view(np.int8),
        "e_scales": (words(40) >> np.uint64(56)).astype(np.uint8),
    }
    new = {name: array.copy() for name, array in base.items()}
    new["a.weight_packed"].reshape(-1)[::37] ^= 0x10
    new["a.weight_packed"].reshape(-1)[5::41] ^= 0x01
    new["b.weight_packed"].view(np.uint32).reshape(-1)[::11] ^= np.uint32(1 << 28 | 1)
    new["c_blocks"] = ~base["c_blocks"]
    new["d.weight_packed"][3] ^= 1
    new["e_scales"][7] += 1
    return Pair(base, new)


def many_tensors() -> Pair:
    """Return small tensors of two types that share chunks, among them unchanged, added and tied ones, and one of more than a tile."""
    words = generator(6)
    bf16, fp8 = dtype_named("BF16"), dtype_named("F8_E4M3")
    base: dict[str, Any] = {}
    for number in range(24):
        dtype = (bf16, fp8)[number % 2]
        size = (1 << 14) + 5 if number == 6 else 40 + number
        base[f"layers.{number:02}.weight"] = weights(dtype, words(size)).view(dtype.numpy)
    new = {name: array.copy() for name, array in base.items()}
    for number, array in enumerate(new.values()):
        if number % 5:
            bits = array.view(f"u{array.itemsize}")
            bits[number :: 17 + 40 * number] += bits.dtype.type(1)
    base["zz.tied"], new["zz.tied"] = base["layers.01.weight"], new["layers.01.weight"]
    new["layers.99.weight"] = weights(bf16, words(30)).view(bf16.numpy)
    return Pair(base, new, {"zz.tied": "layers.01.weight"})


MORE_CASES = [packed_codes, many_tensors]


def main() -> None:
    manifest = {}
    for case in [*CASES, *MORE_CASES]:
        base, new, tied = case()
        name = case.__name__
        delta = deltawire.encode_delta(base, new)
        (GROUPS / f"{name}.delta").write_bytes(delta)
        if case in MORE_CASES:
            write_state(GROUPS / f"{name}.base.safetensors", {n: array for n, array in base.items() if n not in tied})
        manifest[name] = {
            "about": case.__doc__,
            "delta": blake3(delta).hexdigest(),
            "before": deltawire.state_digest(base).hex(),
            "after": deltawire.state_digest(new).hex(),
            "tied": dict(tied),
            "result": facts(new),
        }
    base, new, _ = training_step()
    for number in range(len(CUTS) - 1):
        delta = deltawire.encode_delta(part(base, number), part(new, number))
        (GROUPS / f"part-{number}.delta").write_bytes(delta)
        manifest[f"part-{number}"] = {"about": f"Elements {CUTS[number]} to {CUTS[number + 1]}.", "delta": blake3(delta).hexdigest()}
    MANIFEST.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
