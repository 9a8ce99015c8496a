"""Publishing one model from many processes: each encodes and uploads the parts that it holds, and the first one commits.

publisher         `ShardedPublisher`, which publishes one version after the other
append            how all processes append a version: they encode, upload, commit, and move their baselines
announcing        announces files that several processes upload, while they still encode others
ranks             how the processes communicate
ranges            which elements of a tensor each process publishes. Pure
division          the same for a whole model, and how elements get to the process that publishes them
parts_source      where the parts that a process publishes come from
parts_baseline    the copy of its parts that each process encodes the next version against
quantised_parts   quantising what the processes hold, with the bytes of one process that holds it all
shares            the rows of quantised weights that each process holds
agreed_scales     the scales on which all processes agree
group_scales      scales of groups in a row, chosen on the GPU where the rows are
quantised_source  the parts that are made with these scales
first_rank        what only the first process does, which is to read and write the records of the chain
checkpoint        full checkpoints that all processes write together
shortcuts         skips and anchors, after each version
resume            rebuilds the parts of all processes from the store
"""

from __future__ import annotations

from .publisher import ShardedPublisher
from .ranks import Ranks

__all__ = ["Ranks", "ShardedPublisher"]
