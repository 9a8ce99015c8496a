"""The rules of a fleet as pure functions over values: no I/O, no clock, no randomness of their own.

admission        which results the trainer accepts
training_limits  what a model can be trained on
staleness        how old a policy may be
round_state      one round as the trainer knows it
board            which task is offered to which member
scheduler        how many tasks each member is offered
roster           which members there are, by their heartbeats
desertion        whether all members left because of errors
fleet_clock      how old things are, by a clock that no member can set
"""
