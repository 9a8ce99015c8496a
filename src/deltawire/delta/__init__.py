"""One delta: from two states to a delta file, and from a delta file to the next state.

encode             two states -> a delta file
background_encode  the same on a thread of its own
resolve            a delta file and its base -> a patch, or the next state
patch              absolute indices and values, ready to be written
prepared           a checked change that only remains to be applied, and can be undone
inspect            what a delta file says about itself
"""
