"""The codec on NVIDIA GPUs: CUDA C++ in `kernels/`, compiled at run time. Same bytes as the reference (docs/gpu.md)."""
