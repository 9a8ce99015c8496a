"""Text for people: lines, tables, pictures, numbers and progress bars.

terminal         lines on stdout and stderr
progress         progress bars
help_text        shorter help of commands
plain_output     output for terminals that cannot show every character
event_notices    notices about events that several commands report
log_output       lines of the logger "deltawire"
figures          numbers and names as people read them
tables           tables that fit a width
chain_table      the table that `log` prints
chain_picture    the picture that `log` prints
channel_table    channels and their moves
delta_table      the table that `inspect` prints
fleet_table      the tables that `members` and `top` print
member_lines     lines about the work of a member
publish_report   the report that `publish` prints
plan_table       the report that `plan` prints
completion_text  token ids as text, for `rollouts`
"""
