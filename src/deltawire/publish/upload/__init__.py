"""Turn states into data objects in the store. No record refers to the objects yet.

segments          how the tensors of a state are grouped
data_objects      encodes deltas and full checkpoints, and uploads them at the same time
announcer         announces files of a version while others are still encoded
checkpoint_files  a state as the files of a Hugging Face checkpoint
upload_pool       threads that upload, and do not keep the process alive
"""
