"""A mirror: a directory that holds the newest version as an ordinary checkpoint.

mirror               the directory: which slot is current, who reads and who writes it
slot                 one checkpoint in the mirror, with its record
mirror_update        bringing a slot to a version
hops_on_disk         applying deltas to a checkpoint on disk
checkpoint_in_place  the checkpoint files as writable tensors
mirror_replica       a mirror as the replica of a subscriber
delta_cache          deltas that were fetched, kept for the other slots
locks, durable_json  files that survive crashes and keep processes apart
mirror_errors        operating-system errors as named errors
"""
