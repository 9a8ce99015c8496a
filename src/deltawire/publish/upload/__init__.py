"""From states to data objects in the store. No record refers to the objects yet.

segments          how the tensors of a state are grouped
data_objects      encoding or laying out, and uploading at the same time
checkpoint_files  a state as the files of a Hugging Face checkpoint
upload_pool       threads that upload, and that do not keep the process alive
"""
