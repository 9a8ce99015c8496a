"""The chain of versions, as readers and writers see it (docs/protocol.md).

record_reader   read single records, and check each by itself
log             commits and how they fit together
version         a version as users see it
find            find a version by its number or training step
plan            the cheapest route through known hops
restore         find the hops that a chain offers, and the cheapest route
routes          routes that avoid hops which failed
walk_route      take the hops of a route, and try another route after a failure
fetch           fetch data objects, and check them
memory_state    a state in memory that deltas change
rebuild         bring a state in memory to a version
attachments     the files of a version other than its weights
reader_options  options of all readers
pins            records that keep objects from collection
reports         records of what engines serve
uptime          a clock that counts time in suspension
maintenance     checking and garbage collection
"""
