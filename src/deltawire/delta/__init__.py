"""One delta: from two states to a delta file, and from a delta file to the next state.

encode             two states -> a delta file
background_encode  the same in a separate thread
resolve            a delta file and its base -> a patch, or the next state
plan               which tensor of a state meets which payload, and which memory is written
named_plan         the plan of a delta of version 1 or 2
grouped_plan       the plan of a delta of version 3
overlaps           tensors of a state that share memory
windows            parts of a delta that are decoded without the rest of the file
patch              absolute indices and values, ready to be written
prepared           a checked change that only has to be applied, and can be undone
progress           reports how far a long call of native code is
inspect            what a delta file says without its base
"""
