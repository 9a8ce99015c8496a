"""Bytes at rest: digests, delta files, checkpoints."""
