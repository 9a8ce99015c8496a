"""Modules of a model whose tensors are results of arithmetic, so that single elements cannot be written.

recompute.py      computes such tensors again, in the memory that they have
module_shell.py   copies of modules, on which vLLM's processing runs without any effect on the live model
load_module.py    loads modules anew
reachable.py      finds the tensors and helpers of a module
"""
