"""Delta files of versions 1 and 2 (docs/format.md §7), which deltawire only reads: an encoder, and helpers to change files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from deltawire import Digest
from deltawire.codec.base import Lanes
from deltawire.codec.bits import HostBits
from deltawire.codec.reference.digest import word_sums
from deltawire.codec.reference.encoder import choose_top, encode_coded
from deltawire.codec.reference.payload import BLOCK, CODED, RAW, SAME, TILE
from deltawire.dtypes import DType, dtype_named
from deltawire.format import safetensors_header
from deltawire.format.delta_file import Parts, Structure
from deltawire.format.delta_files.named import VERSION, VERSION_OF_PARTS
from deltawire.format.delta_files.shared import changes_text, to_json
from deltawire.format.safetensors_header import TensorEntry
from deltawire.tensors.bits import keys_of, named_bits


class Encoded(NamedTuple):
    """The payload of a tensor in pieces (none if nothing changes), and the word sums before and after."""

    payload: list[bytes]
    changed: int
    before: Lanes
    after: Lanes


def encode_old(base: Mapping[str, Any], new: Mapping[str, Any]) -> bytes:
    """Return the delta file of version 1, or of version 2 if the states consist of parts."""
    before, after = Digest(), Digest()
    structure = Structure({}, (), {})
    payloads: dict[str, bytes] = {}
    first: dict[object, str] = {}
    aliases, added, removed, parts = {}, {}, [], {}
    for name in sorted({*base, *new}):
        old, now = (named_bits(name, state[name]) if name in state else None for state in (base, new))
        if old is not None and (now is None or not now.can_follow(old)):
            removed.append(name)
            before += keys_of([old]).digest(_sums(old))
            old = None
        elif old is not None:
            before += keys_of([old]).digest(_sums(old))
        if now is None:
            continue
        after += keys_of([now]).digest(_sums(now))
        if now.whole is not None and now.size:
            parts[name] = now.start, now.start + now.size
        if old is None:
            added[name] = now.dtype, now.shape
        elif now.size and first.setdefault((old.memory, now.memory), name) != name:
            aliases[name] = first[old.memory, now.memory]
            continue
        payload = encode_payload(None if old is None else old.bits, now.bits, now.dtype, 0).payload
        if payload:
            payloads[name] = b"".join(payload)
    structure = Structure(added, tuple(removed), {name: target for name, target in aliases.items() if target in payloads})
    is_parts = any(named_bits(name, tensor).whole is not None for name, tensor in new.items())
    data = b"".join(payloads.values())
    sizes = [(name, len(payload)) for name, payload in payloads.items()]
    return build_header(before, after, blake3(data).hexdigest(), sizes, structure, parts if is_parts else None) + data


def encode_payload(base: Any, new: Any, dtype: DType, seed: int) -> Encoded:
    """Return the payload of one tensor. `base` is None for a tensor that is added."""
    now = np.ascontiguousarray(new).reshape(-1)
    old = np.zeros_like(now) if base is None else np.ascontiguousarray(base).reshape(-1)
    changed = int(np.count_nonzero(old != now))
    payload = encode_tensor(old, now, dtype) if changed or base is None else []
    return Encoded(payload, changed, word_sums(old, seed), word_sums(now, seed))


def _chunks(changes: NDArray[np.bool_]) -> Iterator[slice]:
    """Yield the chunks of a block."""
    start = pending = 0
    for tile in range(0, changes.size, TILE):
        end = min(tile + TILE, changes.size)
        pending += int(np.count_nonzero(changes[tile:end]))
        if pending >= TILE or end == changes.size:
            yield slice(start, end)
            start, pending = end, 0


def _encode_chunk(base: HostBits, new: HostBits, dtype: DType, top: int) -> bytes:
    """Return the header and the body of one chunk."""
    if np.array_equal(base, new):
        mode, body = SAME, b""
    else:
        mode, body = CODED, encode_coded(base, new, dtype, top)
        if len(body) >= new.nbytes:
            mode, body = RAW, new.astype(new.dtype.newbyteorder("<")).tobytes()
    return struct.pack("<II", new.size | mode << 30, len(body)) + body


def encode_tensor(base: HostBits, new: HostBits, dtype: DType) -> list[bytes]:
    """Return the pieces of a payload: the element type, then the chunks."""
    pieces = [bytes([dtype.code])]
    for start in range(0, new.size, BLOCK):
        b, n = base[start : start + BLOCK], new[start : start + BLOCK]
        top = choose_top(b, dtype)
        pieces += [_encode_chunk(b[chunk], n[chunk], dtype, top) for chunk in _chunks(b != n)]
    return pieces


def _sums(tensor: Any) -> Any:
    return np.array([word_sums(tensor.bits, int(keys_of([tensor]).seeds[0]))], np.uint32)


def build_header(
    before: Digest, after: Digest, data_hash: str, sizes: Iterable[tuple[str, int]], structure: Structure, parts: Parts | None = None
) -> bytes:
    """Return the bytes before the data section. `sizes` are names and payload sizes, ascending by name."""
    version = VERSION if parts is None else VERSION_OF_PARTS
    metadata = {"deltawire": version, "before": before.hex(), "after": after.hex(), "blake3": data_hash}
    if changes := changes_text(structure):
        metadata["changes"] = changes
    if parts is not None:
        metadata["parts"] = to_json(dict(sorted(parts.items())))
    return safetensors_header.build_header(_entries(sizes), metadata)


def _entries(sizes: Iterable[tuple[str, int]]) -> Iterator[tuple[str, TensorEntry]]:
    end = 0
    for name, size in sizes:
        yield name, TensorEntry(dtype_named("U8"), (size,), end, end + size)
        end += size


def split_old(delta: bytes) -> tuple[dict[str, Any], dict[str, Any], dict[str, bytes]]:
    """Split a delta file into its metadata, its structure, and its payloads."""
    length = int.from_bytes(delta[:8], "little")
    header = json.loads(delta[8 : 8 + length])
    metadata = header.pop("__metadata__")
    data = delta[8 + length :]
    payloads = {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}
    return metadata, json.loads(metadata.pop("changes", "{}")), payloads


def join_old(
    metadata: Mapping[str, Any], changes: Any, payloads: Mapping[str, bytes], edit: Callable[[dict[str, Any]], Any] | None = None
) -> bytes:
    """Join what `split_old` returned, with a correct BLAKE3. `edit` may change the header, or return another one."""
    data = b"".join(payloads.values())
    whole = dict(metadata) | {"blake3": blake3(data).hexdigest()}
    if changes:
        whole["changes"] = changes if isinstance(changes, str) else json.dumps(changes, separators=(",", ":"), ensure_ascii=False)
    header: dict[str, Any] = {"__metadata__": whole}
    end = 0
    for name, payload in payloads.items():
        header[name] = {"dtype": "U8", "shape": [len(payload)], "data_offsets": [end, end + len(payload)]}
        end += len(payload)
    edited = edit(header) if edit else None
    text = json.dumps(header if edited is None else edited, separators=(",", ":"), ensure_ascii=True)
    return join_text(text, data)


def join_text(text: str | bytes, data: bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + data
