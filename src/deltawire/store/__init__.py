"""Object stores behind one small interface: local directories, memory, S3, GCS, Azure and Hugging Face buckets.

`open_store` turns a URL into a `Store`. `probe` refuses a store that the protocol cannot use (docs/protocol.md §8). The client library for
remote stores is imported only when one is opened.

base           the interface, and options
urls           from a URL to a store
local          a directory, with temporary files in staging
memory         the memory of this process
remote         services behind obstore, with clients from providers and errors from remote_errors
retry          repetition of failed requests
link_estimate  the measured link to a store
rate_limit     bytes and requests per second that the user allows
stream_gate    how many transfers run at the same time
stream_ramp    how that number grows on a new link
known_links    that number, for the next store at the same place
wrapped        a store in front of another one
sources        an origin and copies of it as one store, with what is known about each copy in copies
probe          checks whether a store is suitable
occupancy      what a location holds before it is used
keys           keys of a chain; those of a fleet are in fleet_keys
requests       requests as values
create_rule    how records are created although answers may be lost
"""

from __future__ import annotations

from .base import Buffer, ObjectInfo, Progress, Store, StoreOptions, check_key
from .probe import probe
from .urls import open_store

__all__ = ["Buffer", "ObjectInfo", "Progress", "Store", "StoreOptions", "check_key", "open_store", "probe"]
