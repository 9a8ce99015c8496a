"""The checks of `deltawire doctor`. Each module adds findings to an `Examination`, and none of them raises an error of a store or a chain.

findings        what a check has found, and how errors become findings
store_checks    access, create if absent, the clock, and the link
chain_checks    commits, signatures, the data of the newest version, full checkpoints, collection
fleet_checks    members and their clocks
reader_checks   readers, engines that report, and relays
engine_checks   packages of this machine, engines that members name, and a vLLM server
examine         all checks, one after the other
"""
