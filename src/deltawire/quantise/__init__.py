"""Quantising weights before they are published, so that a delta holds exactly the bytes that engines serve (docs/quantise.md).

recipe             what a recipe is: its name, options and release
published_recipe   the recipe that made published tensors, without the patterns of the chain
modules            which modules are quantised, and which of them engines join into one layer
experts            the weights of all experts of a layer in one tensor
layout             which published tensors a recipe makes of a model
kept_weights       why a tensor is not quantised, for messages
config             the `quantization_config` that engines read
scales             fresh scales, and the rule by which previous ones stay
reference          the definition of codes, in NumPy
native             the same in C++
whole_weights      many weights in one call of native code
weight_table       a table of weights, as native code and kernels read it
row_shards         rows of weights, for processes that do not hold whole weights
encode_with_codes  quantises weights while their codes are encoded
exact_arithmetic   NumPy arithmetic that gives the same bits whatever the program has set
gpu/               quantising on NVIDIA GPUs
quantise           whole states
dequantise         the weights that an engine computes with
measure            the error of quantising, and what scales that stayed add to it
"""

from .dequantise import dequantise_state
from .layout import Output, QuantisedLayout, QuantisedWeight, TensorSpec
from .measure import QuantisationError, quantisation_error
from .quantise import quantise_state
from .recipe import DEFAULT_IGNORE, Recipe

__all__ = [
    "DEFAULT_IGNORE",
    "Output",
    "QuantisationError",
    "QuantisedLayout",
    "QuantisedWeight",
    "Recipe",
    "TensorSpec",
    "dequantise_state",
    "quantisation_error",
    "quantise_state",
]
