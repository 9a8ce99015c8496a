"""Checkpoints on disk, in the layout of Hugging Face.

checkpoint       read a checkpoint as a mapping of names to arrays
checkpoint_copy  copy a checkpoint into one that can be changed in place
shard_layout     which tensor was in which file, to write it again byte for byte
staged_output    an output that exists completely or not at all
"""
