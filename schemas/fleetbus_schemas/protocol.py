"""The protocol version: two small integers by which programs of different versions tell whether they may work in one run.

`PROTOCOL` is raised by one when a worker of the version before could not read, or would treat wrongly, what a later version
will write: a new value of a `Literal`, a new member of a union, a subject or a consumer that workers have to know, a rule of
delivery that all must follow. A new field with a default is none of these and raises nothing.

Such a change takes two releases. The first one reads the new form and still writes the old: it raises `PROTOCOL`. The second
one writes it: it raises `NEEDED` to that number. So every version works beside the one before it, in both orders
(docs/decisions/0217-a-protocol-version-in-the-run.md).
"""

from __future__ import annotations

import msgspec

PROTOCOL = 1
"""Read and followed by this program. 0 is that of 0.3.0 and before, which told no number."""

NEEDED = 0
"""To be read and followed by everybody else in a run, because this program writes it. Never above `PROTOCOL`."""


class ProtocolVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one program, or of a run. A run's is the highest of all who declared it, so that it
    never goes back."""

    protocol: int = 0
    needed: int = 0

    def raise_to(self, other: ProtocolVersion) -> ProtocolVersion:
        """The higher of both in each number."""
        return ProtocolVersion(protocol=max(self.protocol, other.protocol), needed=max(self.needed, other.needed))


OWN = ProtocolVersion(protocol=PROTOCOL, needed=NEEDED)


def find_misfit(own: ProtocolVersion, run: ProtocolVersion, name: str) -> str:
    """One line that says why a program must not work in a run called ``name``, and what to do; empty if it may."""
    if own.protocol < run.needed:
        return (
            f"this worker is too old: it has protocol {own.protocol}, run {name} needs {run.needed}: "
            "replace it by one of the version that declared the run"
        )
    if own.needed > run.protocol:
        return (
            f"this worker is too new: it needs protocol {own.needed}, run {name} has {run.protocol}: "
            f"repeat `fleetbus init --run {name}` with this worker's version, after the other workers were replaced by the "
            "version before it"
        )
    return ""
