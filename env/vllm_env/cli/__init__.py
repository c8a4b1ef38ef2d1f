"""Arguments come in; a request, a workspace and in the end an exit code go out.

Only this room parses arguments, prints results or exits; the work is done by the rooms below.
"""
