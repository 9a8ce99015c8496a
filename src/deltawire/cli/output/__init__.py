"""Text for people: terminals, tables, pictures and figures.

terminal         where text goes, progress bars, and how failures end the process
plain_output     output for terminals that cannot show every character
tables           tables that fit a width
figures          numbers and names as people read them
chain_table, chain_picture   what `log` prints
delta_table      what `inspect` prints
fleet_table      what `members` and `top` print
completion_text  token ids as text, for `rollouts`
"""
