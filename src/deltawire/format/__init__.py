"""The formats of files and records.

digest              the digest of a state
content_hash        the hash of bytes
delta_file          the container of a delta
delta_files/        its versions
safetensors_header  the header of a safetensors file
bundle_names        names of tensors if several models share a version
rollouts            the file that holds the result of a task
routing             routed experts in such a file
interactions        a file of requests that a gateway answered
feedback            a file that says what became of answers
live_parts          parts that records of live traffic share
records             the small records in the store
checkpoints         checkpoints on disk
"""
