"""Attachments: the files of a version other than weights, such as config.json, the tokenizer and the chat template.

read_files        reads files that the user gives
model_files       makes files from a live model and its tokenizer
quantised_config  says in config.json how weights are quantised
stored_files      uploads files that changed, and refers to stored files that did not
"""
