"""HTTP for a gateway: its server, the bodies of requests, and who may send one.

http_server.py   serves an ASGI application until it is told to stop
bodies.py        reads the bodies of requests and writes answers
requests.py      reads the parts of a request that the gateway needs
no_route.py      makes the error about a route that the gateway does not have
origins.py       lets pages of named origins use the gateway
api_keys.py      checks the API keys of callers
event_stream.py  splits a stream into events, and changes the JSON of an event
memory.py        counts the memory that bodies, answers and streams take
stoppable.py     ends work of a task after a time, or when a caller has gone
"""
