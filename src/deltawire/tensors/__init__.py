"""Tensors as the codec sees them, in host memory or on a GPU.

bits               one tensor of NumPy or torch as bits, without a copy
names              which names a tensor can have
torch_types        what deltawire asks of torch about a tensor
state              whole states: their digest, their codec, batches of their tensors
columns            states of many tensors, in columns
unwritten_state    states that are written only if they are read
casting            weights rounded to the type that the engines serve
finite             weights that are NaN or infinite
gpu_handover       waiting for GPU work before another thread reads its result
module_tensors     the weights of an `nn.Module` under their wire names
checkpoint_layout  where a live model holds the tensors of its checkpoints
"""
