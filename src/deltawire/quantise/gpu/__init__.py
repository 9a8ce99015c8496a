"""Quantising on NVIDIA GPUs, with the bytes of the reference.

quantiser  quantises weights that are on a GPU
quantised_codes  chooses scales for codes that are not written
unwritten  states whose codes are not written, in columns
kernels/   the kernels, in CUDA C++
"""
