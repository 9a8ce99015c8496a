"""The process that drives a vLLM server. It needs neither vLLM nor torch.

sidecar.py           follows a chain and brings each version into the server
server_replica.py    the weights of the server: fetches deltas into the spool, or lets the server load a full checkpoint
server_update.py     the server as an engine for `SwapController`: pause, update, resume
replica_settings.py  the settings of these updates
staging_waits.py     when to ask the workers whether they have staged a version
worker_versions.py   which versions the workers have, or can go back to
routes.py            a client of the server's HTTP routes
readiness.py         a route that tells load balancers whether the server serves a version of the chain
token_route.py       the route that tells which weights made which token: its requests and answers
worker_experts.py    fetches the routed experts that workers record, and adds them to answers
lora.py              LoRA adapters of a chain, under the names of their versions
lora_follower.py     follows the chain of an adapter, and loads each version into the server
canary.py            checks that decoding computes what prompts do, or what a healthy server has computed
server_canary.py     makes these checks after each update
generation.py        completions for a member of a fleet, from a server that the member drives
"""
