"""The writing side: a trainer's states become versions in an object store (docs/protocol.md §4).

A call of `Publisher.publish` passes through these modules, in this order:

publisher         `Publisher`, for one process: accepts states, and closes everything
writer_options    `WriterOptions`, which all writers share
take_over         checks a chain, and takes it over from earlier writers
resume            finds the version to continue from, and reads it back
publication       one accepted state, and what goes with it
weight_source     the weights of a module, by the names of its checkpoint
publish_warnings  warnings about what is published
channels          moves channels, while a publisher may work
quantising        what is published for a state that is quantised
batches           which segments a GPU quantises and encodes together
snapshots         the publisher's copies of states, and their memory
background        a queue and a thread, for publishing in the background
closing           closes a publisher within a time limit
time_limit        the limit for the time that a call waits
at_exit           publishes accepted versions before the process ends
version_writer    checks, appends and follows up one version
append            encodes, uploads and commits one version
baseline          the copy of the newest version, which the next one is encoded against
history           deltas from the newest version back to recent ones
commits           the writer of the chain's records
attachments/      files of a version other than weights
upload/           data objects: deltas and full checkpoints
shortcuts/        skips, anchors and garbage collection after a version
sharded/          the same for a model that many processes hold together
"""

from __future__ import annotations

from .background import PendingVersion
from .publisher import Publisher
from .shortcuts.cadence import AnchorPolicy
from .writer_options import WriterOptions

__all__ = ["AnchorPolicy", "PendingVersion", "Publisher", "WriterOptions"]
