"""A mirror: a directory that holds the newest version as an ordinary checkpoint.

mirror               the directory, its slots and its locks
slot                 one checkpoint in the mirror, with its record
mirror_update        bring a slot to a version
hops_on_disk         fetch checkpoints, and apply deltas to one on disk
checkpoint_in_place  the checkpoint files as writable tensors
mirror_replica       a mirror as the replica of a subscriber
locks                locks between processes
durable_json         small JSON files that survive crashes
mirror_errors        errors of the operating system as named errors
"""
