"""The spool: a directory on the host of an engine, from which its workers take updates.

delta_spool     the directory
spooled_hop     one update in it
fetching_spool  a spool whose readers fetch what they need themselves
"""
