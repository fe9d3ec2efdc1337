"""Tells the training of a run's own policy from that of the policies which learners train from the same episodes. Pure.

Views of a run show its own policy: that of the learner which asks for the episodes. Lineages of both have the same names.
"""

from collections.abc import Iterable

from fleetbus_schemas import LineageStarted, Message


class JoinedPolicies:
    """The policies whose learners ask for nothing: those that are ``known``, and those whose lineages say so."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.names = set(known)

    def covers(self, subject: str, message: Message | None) -> bool:
        """True for an entry of the training, or of the versions, of such a policy."""
        _, _, kind, *names = subject.split(".")
        if kind not in ("train", "policy"):
            return False
        if isinstance(message, LineageStarted) and message.settings.get("learner", {}).get("requested_by"):
            self.names.add(names[-1])
        return names[-1] in self.names
