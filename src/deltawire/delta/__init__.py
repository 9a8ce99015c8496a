"""One delta: from two states to a delta file, and from a delta file to the next state.

encode             two states -> a delta file
background_encode  the same in a separate thread
resolve            a delta file and its base -> a patch, or the next state
plan               which tensor of a state meets which payload, and which memory is written
patch              absolute indices and values, ready to be written
prepared           a checked change that only has to be applied, and can be undone
progress           reports how far a long call of native code is
inspect            what a delta file says without its base
"""
