"""Object stores behind one small interface: local directories, memory, S3, GCS, Azure and Hugging Face buckets.

`open_store` turns a URL into a `Store`; `probe` refuses one that the protocol cannot be built on (docs/protocol.md §8). The client
library for remote stores is imported only when one is opened.
"""

from __future__ import annotations

from .base import Buffer, ObjectInfo, Progress, Store, StoreOptions, check_key
from .probe import probe
from .urls import open_store

__all__ = ["Buffer", "ObjectInfo", "Progress", "Store", "StoreOptions", "check_key", "open_store", "probe"]
