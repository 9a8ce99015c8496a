"""Every error deltawire raises on purpose. One error, one remedy.

    DeltawireError
    ├── DeltaError                  a delta file cannot be used
    │   ├── CorruptDelta            its bytes are damaged, or break a rule of docs/format.md
    │   ├── UnsupportedVersion      it is of a format version this release does not read
    │   ├── DeltaTooLarge           it would unfold to far more than its own size: a decompression bomb
    │   └── ResultMismatch          it decodes, but not to the state its digest promises
    ├── StateError                  a state cannot take this delta
    │   ├── BaseMismatch            it is not the state that the delta was made from
    │   ├── TensorMissing           it lacks a tensor that the delta changes
    │   ├── TensorUnexpected        it already holds a tensor that the delta adds
    │   ├── DtypeMismatch           a tensor has another element type than the delta's
    │   ├── ShapeMismatch           a tensor has another number of elements than the delta's
    │   └── StateNotWritable        a tensor, or the mapping itself, cannot be changed in place
    ├── TensorError                 a tensor cannot be used at all
    │   ├── UnsupportedDtype        its element type is none that the format knows
    │   ├── UnsupportedTensor       it is neither a NumPy array nor a dense torch CPU tensor
    │   └── BadTensorName           its name cannot stand in a safetensors file
    ├── CheckpointError             a checkpoint file or directory cannot be read or written
    └── CodecUnavailable            the codec that was asked for cannot run here

All errors leave the state as it was.
"""

from __future__ import annotations


class DeltawireError(Exception):
    """Root of the tree. `hint` says what to do about it; it is part of the message."""

    hint: str = ""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} {self.hint}".rstrip())


class DeltaError(DeltawireError):
    """A delta file cannot be used."""


class CorruptDelta(DeltaError):
    """The bytes are damaged or break a rule of the format."""

    hint = "Fetch or make the delta again."


class UnsupportedVersion(DeltaError):
    """The file is of a version that this release does not read."""

    hint = "Upgrade deltawire."


class DeltaTooLarge(DeltaError):
    """The tensors that it adds are out of all proportion to its size."""

    hint = "Do not trust where it came from."


class ResultMismatch(DeltaError):
    """The delta decodes, but not to the state that its digest promises."""

    hint = "The delta is damaged or was written by a faulty encoder; make it again."


class StateError(DeltawireError):
    """A state cannot take this delta."""


class BaseMismatch(StateError):
    """The state is not the one that the delta was made from."""

    hint = "Apply the deltas in order, each to the state it was made from, or start again from a full checkpoint."


class TensorMissing(StateError):
    """The state lacks a tensor that the delta changes or removes."""

    hint = "Is this the model, and the version of it, that the delta was made from?"


class TensorUnexpected(StateError):
    """The state already holds a tensor that the delta adds."""

    hint = "Was this delta applied before?"


class DtypeMismatch(StateError):
    """A tensor of the state has another element type than the delta's."""

    hint = "Cast nothing between trainer and reader: deltas are exact."


class ShapeMismatch(StateError):
    """A tensor of the state has another number of elements than the delta's."""

    hint = "Is this the model that the delta was made from?"


class StateNotWritable(StateError):
    """A tensor, or the mapping that holds it, cannot be changed in place."""

    hint = "Pass writable arrays in a mutable mapping, or use resolve_delta and place the values yourself."


class TensorError(DeltawireError):
    """A tensor cannot be used at all."""


class UnsupportedDtype(TensorError):
    """The element type is none that the format knows."""

    hint = "Known are bool, (u)int8–64, fp8 e4m3fn, e5m2 and e8m0, fp16, bf16, fp32 and fp64."

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        super().__init__(f"element type {dtype!r} is not supported.")


class UnsupportedTensor(TensorError):
    """The object is neither a NumPy array nor a dense torch CPU tensor."""

    hint = "Pass NumPy arrays or dense torch tensors on the CPU."


class BadTensorName(TensorError):
    """The name cannot stand in a safetensors file."""

    hint = "Names are non-empty strings of valid Unicode, other than '__metadata__'."


class CheckpointError(DeltawireError):
    """A checkpoint file or directory cannot be read or written."""


class CodecUnavailable(DeltawireError):
    """The codec that was asked for cannot run here."""

    hint = "Unset DELTAWIRE_CODEC to let deltawire choose."
