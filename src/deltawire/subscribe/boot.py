"""Which boot of the operating system this is: what a mirror asks to know whether the page cache still holds what was written."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str | None:
    """A name that changes with every boot; None where the system gives none, which must be taken as "another boot"."""
    try:
        return _BOOT_ID.read_text().strip() or None
    except OSError:
        return None
