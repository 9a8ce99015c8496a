"""The versions of the delta file.

shared   what all versions have in common
named    versions 1 and 2, which name every tensor that changes
grouped  version 3, which codes the tensors of an element type together
"""
