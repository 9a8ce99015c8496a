"""Checkpoints on disk, as Hugging Face lays them out.

checkpoint       reading one as a mapping of names to arrays
checkpoint_copy  copying one into a new one that can be changed in place
shard_layout     which tensor was in which file, so that it can be written again byte for byte
staged_output    an output that exists completely or not at all
"""
