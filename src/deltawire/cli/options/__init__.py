"""Options that several commands share. Each command documents its other options itself.

common    output, threads and replacing files
chain     which chain, which version, and which keys a reader trusts
member    what a member of a fleet generates and scores with
adapters  adapters that a server gets from chains of their own
channels  which channel, and how it moves
engine    how a vLLM server is kept up to date
metrics   where metrics are served
network   how much of a link and of a service a command uses
server    on which port a command listens
"""
