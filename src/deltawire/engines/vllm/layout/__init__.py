"""Layouts: the positions in memory where a vLLM worker keeps the weights of a chain, learnt from vLLM's loaders and processing.

types.py             the shared types: nests, placements, layouts of tensors
nested_strides.py    finds nested strides in a list of positions, and composes them
loader_copies.py     stage 1: runs the model's loaders on meta tensors, and records what they copy where
lacking_tensors.py   tensors that the model was loaded with and that a chain lacks
processing_views.py  stage 2 for modules whose processing only makes views
processing_map.py    stage 2 for others: runs vLLM's processing on copies of them, and learns where it moves each unit
unit_values.py       values for raw parameters in stage 2: neutral, random, or digits of positions
position_decoder.py  finds where such digits are after processing
learn_layout.py      composes both stages to the layout of a model
model_layout.py      the layout of a model: reads and locates the elements of its tensors
placements.py        reads and writes tensors where placements say that they are
"""
