"""Updates of a worker's live memory, in the order in which an update passes through the modules.

live_updates.py      learn the layout, adopt a version, prepare, swap
live_staging.py      stages updates on a separate thread
live_weights.py      a worker's weights at a version; decodes updates against them
module_rules.py      modules that are computed from changed weights, and are brought up to date by themselves
swap_transaction.py  all workers write and confirm an update, or all write the old values back
layout_update.py     one such update: decoded, written, undone
direct_tensors.py    tensors that a worker holds as the checkpoint has them
direct_files.py      decodes the files that change only direct tensors
direct_patches.py    what was decoded from them, written and digested in one pass
staging_pace.py      spreads the decoding over time
scatter_lists.py     lists of elements to write
interfaces.py        what an update needs from others: layouts, tensors that are not in memory
update_types.py      types that these modules share
ownership.py         which worker digests which elements
peers.py             tensors that are read from the memory of other workers (peer_memory.py reads it)
peer_memory.py       reads the memory of other workers of the same host
own_bases.py         tensors of which a worker holds nothing, but whose elements share blocks with tensors that it holds
kept_bases.py        one copy on the host of the tensors that no worker's memory has
cold_start.py        loads full checkpoints, from the store or from a mirror
undo.py              the last updates, kept so that a worker can go back to earlier versions
"""
