"""Publishing one model from many processes: each encodes and uploads what it holds, the first one commits.

`ranks` is how they talk, `shares` (pure) who publishes what, `publisher` one version after the other, `skips` several in one step, `anchor`
and `resume` what needs tensors to be moved between them: whole checkpoints, and taking a chain up again.
"""

from __future__ import annotations

from .publisher import ShardedPublisher
from .ranks import Ranks

__all__ = ["Ranks", "ShardedPublisher"]
