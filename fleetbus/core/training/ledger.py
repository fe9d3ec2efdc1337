"""The settled requests, and the floor below which all are settled (docs/concepts/delivery.md, rule 8). Pure.

A request is settled when its episode was trained or excluded with a recorded reason. A checkpoint carries `floor` and
`settled_above`; a learner that resumes reads the log from the floor and leaves those ids alone.
"""

from collections.abc import Iterable


class Ledger:
    """Requests by log position."""

    def __init__(self, floor: int = 1, settled: Iterable[str] = ()) -> None:
        self._forgotten_below = 0
        self._settled = set(settled)
        self._asking: dict[str, int] = {}
        self._known = floor - 1
        self._open: dict[str, int] = {}
        self._sequences: dict[str, int] = {}

    def register_pending(self, episode_id: str) -> None:
        """A request is about to be stored: its position, still unknown, will be above every one that is known by now.

        Its answer may be late, and requests stored after it be settled first: until then the floor stays below it.
        """
        if episode_id not in self._sequences:
            self._asking[episode_id] = self._known + 1

    def withdraw(self, episode_id: str) -> None:
        """The request that was about to be stored stands in the log already, and is settled."""
        self._asking.pop(episode_id, None)

    def register(self, episode_id: str, sequence: int) -> bool:
        """Enter a request; False if it is settled or known already."""
        asked = self._asking.pop(episode_id, None) is not None
        self._known = max(self._known, sequence)
        if episode_id in self._sequences or (sequence < self._forgotten_below and not asked):
            return False
        self._sequences[episode_id] = sequence
        if episode_id in self._settled:
            return False
        self._open[episode_id] = sequence
        return True

    def register_result(self, episode_id: str, stated: int, position: int) -> int:
        """Enter a request whose result stands at ``position`` of the log and states ``stated`` as the request's; its position.

        A worker's word moves the floor only within what is known: behind all that was known before the request was made, and
        before its result.
        """
        if episode_id not in self._sequences:
            self.register(episode_id, max(min(stated, position), self._asking.get(episode_id, 1)))
        return self._sequences[episode_id]

    def settle(self, episode_id: str) -> None:
        """The episode is trained or excluded; raises `ValueError` when it is settled already or was never requested."""
        if episode_id not in self._open:
            raise ValueError(f"episode {episode_id} is settled already, or was never requested")
        del self._open[episode_id]
        self._settled.add(episode_id)

    def forget_settled(self) -> None:
        """Drop what is settled below the floor: it is never named again, and a run has millions."""
        floor = self.floor
        for episode in [episode for episode, sequence in self._sequences.items() if sequence < floor]:
            del self._sequences[episode]
            self._settled.discard(episode)
        self._forgotten_below = max(self._forgotten_below, floor)

    def __len__(self) -> int:
        """Requests that are remembered."""
        return len(self._sequences)

    @property
    def open_ids(self) -> tuple[str, ...]:
        return tuple(self._open)

    @property
    def floor(self) -> int:
        """Lowest log position that a request which is not settled has or may have; one after the last when all are."""
        if self._open or self._asking:
            return min((*self._open.values(), *self._asking.values()))
        return self._known + 1

    @property
    def settled_above(self) -> tuple[str, ...]:
        """Settled ids whose request stands at or above the floor."""
        floor = self.floor
        return tuple(episode for episode, sequence in self._sequences.items() if sequence >= floor and episode in self._settled)
