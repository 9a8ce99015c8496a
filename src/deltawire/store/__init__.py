"""Object stores behind one small interface: local directories, memory, S3, GCS, Azure and Hugging Face buckets.

`open_store` turns a URL into a `Store`. `probe` refuses a store that the protocol cannot use (docs/protocol.md §8). The client library for
remote stores is imported only when one is opened.

base           the interface, and options
urls           from a URL to a store
local          a directory, with temporary files in staging
staging        temporary files of such a directory
memory         the memory of this process
remote         services behind obstore
providers      clients for each service
remote_errors  errors of the client library, in our words
retry          repetition of failed requests
wrapped        a store in front of another one
probe          checks whether a store is suitable
occupancy      what a location holds before it is used
keys           keys of a chain
fleet_keys     keys of a fleet
live_keys      keys of live traffic
requests       requests as values
create_rule    how records are created although answers may be lost
streams/       how much is transferred at the same time
copies/        an origin and copies of it as one store
"""

from __future__ import annotations

from .base import Buffer, ObjectInfo, Progress, Store, StoreOptions, check_key
from .probe import probe
from .urls import open_store

__all__ = ["Buffer", "ObjectInfo", "Progress", "Store", "StoreOptions", "check_key", "open_store", "probe"]
