"""Updates of a worker from a mirror: two checkpoints on the host are compared.

mirror_updates.py writes what differs between two versions, or loads everything
staging.py        finds out what differs between the version that a worker has and the next one
element_map.py    where a model keeps the elements of a checkpoint; writes changed elements there
read_back.py      reads weights back through the model's own loaders, and compares them
"""
