"""Options that several commands share. Each command documents its other options itself.

common   output, threads and replacing files
chain    which chain, which version, and which keys a reader trusts
member   what a member of a fleet generates and scores with
"""
