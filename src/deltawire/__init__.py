"""Bit-exact weight updates for asynchronous RL, at 7 bits per changed weight.

>>> delta = deltawire.encode_delta(base, new)
>>> deltawire.apply_delta(base, delta)      # base is now new, bit for bit

>>> with deltawire.Publisher("s3://bucket/run", dtype="bfloat16") as publisher:      # on the trainer
...     publisher.publish(model, step=1)
>>> with deltawire.Subscriber("s3://bucket/run") as subscriber:      # anywhere else
...     subscriber.sync()

The packages and modules, each of which imports only those above it (docs/architecture.md has more):

errors      every error that deltawire raises on purpose
warnings    every warning
events/     what happened, as plain values for logs and metrics
telemetry/  events for Prometheus, trackers and traces
dtypes      the element types that a checkpoint can hold
addresses   addresses on which servers listen
codec/      the elements of one tensor
format/     bytes at rest: delta files, checkpoints, records
tensors/    states: names to tensors
quantise/   from weights to the codes and scales that engines load
delta/      encodes, decodes and applies whole states
store/      keys and bytes
chain/      reads a chain of versions
publish/    writes one
subscribe/  keeps a replica of one
relay/      copies one to another region
fleet/      rollouts from a fleet, through the store
live/       what users got and said, and the rules of gates
planning/   what a run would cost
dashboard/  a page that shows a run
engines/    vLLM, SGLang and transformers
gateway/    a proxy in front of engines, which records what it answers
trainers/   adapters for training libraries
rl/         a small trainer, and the generator of a member
testing/    conformance suites and simulations
cli/        the command `deltawire`
"""

import importlib
import typing

from .delta.encode import encode_delta
from .delta.patch import ResolvedPatch, TensorPatch
from .delta.resolve import apply_delta, resolve_delta
from .errors import DeltawireError
from .format.digest import Digest
from .tensors.state import state_digest

if typing.TYPE_CHECKING:
    from .chain.reader_options import ReaderOptions as ReaderOptions
    from .chain.version import Version as Version
    from .delta.background_encode import PendingDelta as PendingDelta
    from .delta.background_encode import start_delta as start_delta
    from .events import Event as Event
    from .format.records.signing import SigningKey as SigningKey
    from .publish import AnchorPolicy as AnchorPolicy
    from .publish import Publisher as Publisher
    from .publish import WriterOptions as WriterOptions
    from .subscribe import Subscriber as Subscriber
    from .subscribe.pull import pull as pull

__all__ = [
    "AnchorPolicy",
    "DeltawireError",
    "Digest",
    "Event",
    "PendingDelta",
    "Publisher",
    "ReaderOptions",
    "ResolvedPatch",
    "SigningKey",
    "Subscriber",
    "TensorPatch",
    "Version",
    "WriterOptions",
    "apply_delta",
    "encode_delta",
    "pull",
    "resolve_delta",
    "start_delta",
    "state_digest",
]
__version__ = "0.1.0"

# These names are imported at their first use, so that a program that only uses the codec starts quickly.
_LATER = {
    "AnchorPolicy": ".publish",
    "Event": ".events",
    "PendingDelta": ".delta.background_encode",
    "Publisher": ".publish",
    "ReaderOptions": ".chain.reader_options",
    "SigningKey": ".format.records.signing",
    "Subscriber": ".subscribe",
    "Version": ".chain.version",
    "WriterOptions": ".publish",
    "pull": ".subscribe",
    "start_delta": ".delta.background_encode",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LATER[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
