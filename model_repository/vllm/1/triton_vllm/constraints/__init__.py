"""Constraints on the text of an answer: in comes a schema, regex or grammar, out goes a refusal if it is bad.

A process of its own tries each new constraint, since one may take for ever or crash.
No other room starts a process for a request.
"""
