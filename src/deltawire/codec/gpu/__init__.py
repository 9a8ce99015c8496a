"""The codec on NVIDIA GPUs: CUDA C++ in `kernels/`, compiled at run time. It gives the same bytes as the reference (docs/gpu.md).

codec                groups with CUDA tensors go to the kernels, all others to the codec of the host
resolution           the same for resolutions
codec_stream         the stream that the codec works on
digest               the state digest
find_large_elements  tensors that have an element whose magnitude reaches a limit
encode               blocks of tensors -> chunks, one slab of blocks at a time
resolve              payloads and their bases -> a patch on the device, one slab of chunks at a time
patch                decoded changes on the device, ready to be written
payloads             payloads in host memory, and their copies to the device
chunk_walk           where the chunks of payloads are
slabs                which chunks are processed together, and the memory that they need
kernel_addresses     addresses at which kernels can read tensors
kernel_table         the structures that tell kernels about tensors
device               one GPU: its memory, its streams, its kernels
compiler             kernels from source to launch
sources              the source of the kernels

A *slab* is a run of blocks or chunks that the device processes at a time, so that memory stays bounded. A *tile* has 2^14 elements.
"""
