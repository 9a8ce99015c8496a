"""The source of the kernels, in the order in which the files depend on each other."""

from __future__ import annotations

from importlib import resources

_PARTS = ("common", "numbers", "masters", "scan", "chunks", "plan", "heads", "decode", "locate", "patch")


def kernel_source() -> str:
    """Return CUDA C++ that needs no header. It is compiled once per element width, with `WIDTH` defined."""
    folder = resources.files(__package__) / "kernels"
    return "".join((folder / f"{name}.cuh").read_text() for name in _PARTS)


def number_source() -> str:
    """Return the functions for numbers of quantised weights, which other kernels use, too."""
    return (resources.files(__package__) / "kernels" / "numbers.cuh").read_text()
