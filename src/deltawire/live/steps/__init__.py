"""Live traffic as steps without I/O, as those of a fleet: they yield requests to the store and are sent the answers.

file_steps     reads new files of all gateways, in bounded pieces
clock_steps    asks the store for its time
metric_steps   declares metrics, and reads the declaration in force
joiner_steps   reads interactions and feedback, joins them, and makes the rows of live tasks
live_rounds    opens rounds with live tasks
"""
