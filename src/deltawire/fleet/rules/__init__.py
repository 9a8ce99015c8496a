"""The rules of a fleet, as functions and classes that do no I/O, read no clock and draw no random numbers.

admission        which results the trainer accepts
training_limits  which results a model can be trained on
staleness        how old a policy may be
round_state      one round as the trainer knows it
board            which task is offered to which member
scheduler        how fast each member is, and which tasks it is offered
assignment       how open tasks are divided among members of known speed
roster           which members there are, by their heartbeats
desertion        whether all members left because of errors
fleet_clock      how old objects are, by a clock that no member can set
"""
