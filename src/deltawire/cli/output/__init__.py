"""Text for people: lines, tables, pictures, numbers and progress bars.

terminal         lines on stdout and stderr
progress         progress bars
help_text        shorter help of commands
plain_output     output for terminals that cannot show every character
event_notices    notices about events that several commands report
figures          numbers and names as people read them
tables           tables that fit a width
chain_table      the table that `log` prints
chain_picture    the picture that `log` prints
delta_table      the table that `inspect` prints
fleet_table      the tables that `members` and `top` print
publish_report   the report that `publish` prints
completion_text  token ids as text, for `rollouts`
"""
