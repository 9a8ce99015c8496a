"""The files that every version has beside its weights: config.json, the tokenizer, the chat template.

read_files    files that the user gives
model_files   files taken from a live model and its tokenizer
stored_files  uploading what changed, referring to what did not
"""
