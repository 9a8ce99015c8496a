"""The chain of versions, as readers and writers see it (docs/protocol.md).

log             commits and how they fit together
newest_number   find the newest of numbered objects with few questions
void_commits    commits that do not count, as later commits tell
version         a version as users see it
find            find a version by its number or training step
channels        named pointers into a chain
fetch           fetch data objects, and check them
memory_state    a state in memory that deltas change
attachments     the files of a version other than its weights
reader_options  options of all readers
uptime          a clock that counts time in suspension
records/        read the records of a chain, each by itself
routes/         find the hops from a state to a version, and take them
maintenance/    checking and garbage collection
"""
