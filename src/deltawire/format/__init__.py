"""The formats of files and records.

digest              the digest of a state
content_hash        the hash of bytes
delta_file          the container of a delta
safetensors_header  the header of a safetensors file
bundle_names        names of tensors if several models share a version
rollouts            the file that holds the result of a task
records             the small records in the store
checkpoints         checkpoints on disk
"""
