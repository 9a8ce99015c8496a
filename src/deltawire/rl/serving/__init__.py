"""A small OpenAI-compatible server over a transformers model that follows a chain, for small models, tests and demos.

openai_server  the server
openai_shapes  what a request asks for, and the forms of answers
batch_server   generates for many callers at once
"""
