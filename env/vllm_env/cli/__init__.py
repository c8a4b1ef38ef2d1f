"""The command line: from arguments to a request and a workspace, from an outcome to an exit code.

Only this room parses arguments, prints results or exits. The rooms below do the work.
"""
