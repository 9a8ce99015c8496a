"""A page that shows a run from its store alone: live in a browser (`deltawire dashboard`), or as one file (`deltawire report`).

read_only        a store that counts what is read and refuses to write
fetch_many       reads many small records at once
plain_values     turns what a store says into values that are safe to send
chain_scan       reads the newest commits, and samples of all others
chain_pages      reads older commits when somebody wants to see them
channels_scan    reads channels and their moves
newest_files     finds the newest files of live traffic without a listing of all
traffic_scan     reads interactions and feedback, and counts them
gates_scan       reads the evidence of gates
fleet_scan       reads heartbeats, rounds, leases and acknowledgements, a few in each look
member_history   keeps what was seen of a member over time
readers_scan     reads pins, reports, relays and marks
version_details  compares a version with the one before it, tensor by tensor
faults           lists what is wrong. Pure
observer         looks at the store again and again, and keeps the sections of the page
single_file      writes the page with its data as one file
server           serves the page to browsers of this machine
host_names       checks the header `Host`
page_files       lists the files of the page
page/            HTML, CSS and JavaScript, which a browser loads as they are

Everything in a store is hostile until it is checked. Limits bound what a look reads, what is kept in memory and what a browser gets,
however long the chain is and however many members there are. Nothing here writes to the store.
"""

from .observer import Observer, ObserverOptions
from .single_file import write_report

__all__ = ["Observer", "ObserverOptions", "write_report"]
