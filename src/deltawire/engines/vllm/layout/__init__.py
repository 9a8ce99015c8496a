"""Where a vLLM worker keeps the weights of a chain: layouts that are learnt from vLLM's own loaders and from its own processing.

types.py           the shared types: nests, placements, layouts of tensors
nests.py           finds nested strides in a list of positions, and composes them
loader_copies.py   stage 1: runs the model's loaders on meta tensors, and records what they copy where
processing_map.py  stage 2: runs vLLM's processing on copies of modules, and learns where it moves each unit
model_layout.py    composes both stages; reads weights in checkpoint layout, and finds the positions of changes
"""
