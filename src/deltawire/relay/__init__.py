"""Relays: keep a copy of a chain in the store of another region.

relay              the loop, and what users see
version_copy       commits and their data, in order
channel_copy       moves of channels
announcement_copy  files of the next version, before its commit
data_copy          data objects, checked, several at the same time
region_records     records, byte for byte, and the floor of the region
shortcut_copy      full checkpoints and skips, made in the region
rebuild            their files, from a replica of the model
"""

from __future__ import annotations

from .relay import Relay

__all__ = ["Relay"]
