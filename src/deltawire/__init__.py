"""Bit-exact weight updates for asynchronous RL, at 7 bits per changed weight.

>>> delta = deltawire.encode_delta(base, new)
>>> deltawire.apply_delta(base, delta)      # base is now new, bit for bit
"""

from .encode import encode_delta
from .errors import DeltawireError
from .format.digest import Digest
from .patch import ResolvedPatch, TensorPatch
from .resolve import apply_delta, resolve_delta
from .state import state_digest

__all__ = [
    "DeltawireError",
    "Digest",
    "ResolvedPatch",
    "TensorPatch",
    "apply_delta",
    "encode_delta",
    "resolve_delta",
    "state_digest",
]
__version__ = "0.1.0"
