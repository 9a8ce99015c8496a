"""Stores as commands open them: with notices about retries, a trace of requests, and counted bytes.

opened         opens the store of a command
traced_store   prints every request, for --verbose
metered_store  counts bytes, for progress bars
"""
