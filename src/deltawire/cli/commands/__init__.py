"""One module per subcommand of `deltawire`. `cli/__init__.py` lists them and groups them for `--help`.

publish    a checkpoint becomes a version
log        the versions of a chain
show       one version, or the newest
pull       writes a version to a directory
follow     keeps a mirror directory at the newest version
verify     checks every record and file of a chain
gc         deletes garbage
doctor     examines a store, a chain, a fleet and this machine
channels   the channels of a chain
promote    moves a channel to a version
rollback   moves a channel back
relay      copies a chain to the store of another region
keygen     makes a key that signs
events     what happened, as the store tells it
dashboard  a page that shows a run, live
report     the same page as one file
plan       computes what a run costs
serve      a small server over a model that follows a chain
sidecar    keeps a vLLM server at the newest version
canary     compares what a server generates with what a healthy one did
gateway    the proxy that answers requests of users and records them
gate       judges a canary
member     one member of a fleet
fleet      several members on this machine
members    who works in a fleet
top        the same, live
rollouts   results of a fleet
diff       encodes a delta between two checkpoints
apply      applies a delta file to a checkpoint
inspect    what a delta file says
"""
