"""Data objects on a reader's disk.

host_cache      the processes of a host share the files that one of them has fetched
cache_folder    one directory of such a cache
private_folder  directories that belong to one user and that processes of one host share
delta_cache     delta files that are needed again
"""
