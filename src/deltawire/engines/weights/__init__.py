"""The live weights of a module, as the weights that a `MemoryReplica` keeps up to date (deltawire/subscribe/replica_weights.py).

in_place.py        weights that the codec can reach: deltas are decoded against them, and there is no copy
host_copy.py       weights on any other device: deltas are decoded against a copy on the host, and patches go to the device
dequantised.py     floating-point weights of a quantised chain: each version is dequantised into them
module_weights.py  the way that suits each version
live_tensors.py    the module's tensors by the names of the chain, and the version that they hold
fit.py             whether a module can hold the weights of a chain
"""
