"""Constraints on the text of an answer: check a schema, regular expression or grammar.

A separate process tries each new constraint, because compiling it may take for ever or crash. No
other room starts a process for a request.
"""
