"""Quantising on NVIDIA GPUs, with the bytes of the reference.

quantiser  quantises weights that are on a GPU
kernels/   the kernels, in CUDA C++
"""
