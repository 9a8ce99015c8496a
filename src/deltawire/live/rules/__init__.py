"""Decisions about live traffic, as pure functions: they read no clock and no store.

join          gives interactions the rewards that feedback says
join_table    keeps what waits for feedback
next_message  finds the user's next message after an answer
"""
