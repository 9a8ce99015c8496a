"""How an engine gets from one version to the next.

swap_controller.py  pauses the engine, applies a prepared change, confirms it, resumes; reverts or quarantines when a step fails
forward_lock.py     keeps forward passes and swaps apart, for engines that run in this process
live_intervals.py   records which version was live at which time
"""
