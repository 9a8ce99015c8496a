"""How the process of a command starts, ends and runs other commands.

exit_codes          turns errors and signals into exit codes
ending              ends commands that run until a signal arrives, even if something hangs
leaving             lets commands that serve or work end in order when a signal arrives
usage_errors        reports wrong usage as JSON, too
evaluation_command  the command that `gate --evaluate` runs for a canary
exec_hook           the command that `follow --exec` runs for each version
"""
