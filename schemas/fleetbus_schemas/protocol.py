"""The version of the rules by which the workers of one run deal with each other, and when it is raised.

It is raised by a change after which a worker of the version before would do harm in the run, or wait without end: another
meaning of a message or a field, other subjects, consumers or streams, another rule of delivery. It is not raised by what such
workers ignore: new messages, new fields with defaults, new commands. Releases of one protocol work side by side.

A run has the protocol that `fleetbus init` or `up` declared last, in the metadata of its log. See
docs/decisions/0213-a-run-has-a-protocol.md.
"""

PROTOCOL = 2
"""2: commands stand in subjects, consumers of viewers are counted by key, settled episodes leave the log. 1: releases before
there was a number, up to 0.3.0."""

UNNUMBERED = 1
"""Of a log whose metadata names none."""
