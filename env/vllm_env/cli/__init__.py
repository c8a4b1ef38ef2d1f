"""The command line: turn arguments into a request and a workspace, and the outcome into an exit code.

Only this room parses arguments, prints results or exits. The rooms below do the work.
"""
