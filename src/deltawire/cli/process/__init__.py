"""How the process of a command starts, ends and runs other commands.

exit_codes    turns errors and signals into exit codes
ending        ends commands that run until a signal arrives, even if something hangs
usage_errors  reports wrong usage as JSON, too
exec_hook     the command that `follow --exec` runs for each version
"""
