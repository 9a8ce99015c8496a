"""Decisions about live traffic, as pure functions: they read no clock and no store.

join          gives interactions the rewards that feedback says
join_table    keeps what waits for feedback
revisions     bounds the revisions of one caller
next_message  finds the user's next message after an answer
"""
