"""Tensors as the codec sees them, in host memory or on a GPU.

bits               one tensor of any library, as bits without a copy
state              whole states: digests, and how work on them is split up
casting            weights rounded to the type that the fleet serves
finite             which weights are NaN or infinite
gpu_handover       waiting for GPU work before another thread reads its result
module_tensors     the weights of an `nn.Module` under their wire names
checkpoint_layout  where a live model holds the tensors of its checkpoints
"""
