"""The rules of a fleet, as functions and classes that do no I/O, read no clock and draw no random numbers.

admission        which results the trainer accepts
training_limits  which results a model can be trained on
staleness        how old a policy may be
version_delays   how long versions take to reach each member
round_state      one round as the trainer knows it
board            which task is offered to which member
scheduler        how fast each member is, and which tasks it is offered
measurements     how fast each member is and how long tasks take, as the trainer measures it
assignment       how open tasks are divided among members of known speed
roster           which members there are, by their heartbeats
desertion        whether all members left because of errors
fleet_clock      how old objects are, by a clock that no member can set
live_tasks       tasks whose results come from interactions with users
live_owners      which training step each interaction belongs to
"""
