"""Refuses by number what is below a raised floor (`FloorRaised`): requests, claims, sessions that the log need not hold.

An entry that is refused changes nothing, wherever the log is folded: it is a late copy, or its author was away for too long.
Pure.
"""

import re

from fleetbus_schemas import EpisodeRequested, FloorRaised, Message

NO_FLOOR = FloorRaised(sequence=0)

_GROUP = re.compile(r"g(\d+)")


def parse_group_number(group_id: str, default: int | None = None) -> int:
    """The number in a training group's id; for an id that no learner gives, ``default``, or `ValueError`."""
    if (found := _GROUP.fullmatch(group_id)) is not None:
        return int(found[1])
    if default is None:
        raise ValueError(f"{group_id} is not the id of a training group")
    return default


def find_group_number(request: EpisodeRequested) -> int | None:
    """The number of the group if a learner asks for it to train it, else None."""
    found = _GROUP.fullmatch(request.group_id) if request.split == "train" and request.lineage else None
    return int(found[1]) if found else None


def merge_floors(raised: FloorRaised, stored: Message | None) -> FloorRaised:
    """The higher of both by every number."""
    if not isinstance(stored, FloorRaised):
        return raised
    policies = raised.groups | stored.groups
    groups = {policy: max(raised.groups.get(policy, 0), stored.groups.get(policy, 0)) for policy in policies}
    return FloorRaised(
        sequence=max(raised.sequence, stored.sequence), groups=groups, sessions=max(raised.sessions, stored.sessions)
    )


def refuses_request(floor: FloorRaised, request: EpisodeRequested) -> bool:
    """True for an episode that was settled for good, and for a request that was on its way for as long as that takes."""
    number = find_group_number(request)
    if number is not None:
        return number < floor.groups.get(request.policy, 0)
    return 0 < request.earliest_sequence < floor.sequence


def refuses_delivery(floor: FloorRaised, request: EpisodeRequested, sequence: int) -> bool:
    """True if the request that stood at that position may not be claimed, nor be given a result, any more."""
    return sequence < floor.sequence or refuses_request(floor, request)
