"""What a recording tells a learner: its episodes with their Actions and images, and the tasks that they were about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.episodes import decode_entries, decode_episode_entry
from fleetbus.errors import UserError
from fleetbus.recording import Recording
from fleetbus.recording.objects import find_referenced_objects
from fleetbus_schemas import EpisodeFinished, EpisodeRequested, Task


class Told(msgspec.Struct, kw_only=True):
    """What a learner reads of one episode; ``actions`` by the positions where they were recorded."""

    request: EpisodeRequested
    result: EpisodeFinished | None = None
    result_entry: StreamEntry | None = None
    actions: dict[int, StreamEntry] = msgspec.field(default_factory=dict)

    @property
    def trained(self) -> Iterator[StreamEntry]:
        """The Actions that the result names, in order."""
        for reference in self.result.actions if self.result is not None else ():
            if (entry := self.actions.get(reference.sequence)) is not None:
                yield entry


def read_told(recording: Recording) -> dict[str, Told]:
    """All episodes of which the request was recorded, in order. Actions stay as they are: the learner decodes them."""
    found: dict[str, Told] = {}
    for entry in recording.entries:
        _, _, kind, rest = entry.subject.split(".", 3)
        if kind not in ("task", "act", "episode"):
            continue
        told = found.get(rest.rpartition(".")[2])
        if kind == "task" and told is None:
            for _, request in decode_entries(EpisodeRequested, [entry]):
                found[request.episode_id] = Told(request=request)
        elif told is None:
            continue
        elif kind == "act":
            told.actions[entry.sequence] = entry
        elif told.result is None and isinstance(message := decode_episode_entry(entry), EpisodeFinished):
            told.result, told.result_entry = message, entry
    return found


def check_images(recording: Recording, stories: Iterable[Told]) -> None:
    """A learner trains on the images that its Actions show: without them it would leave their episodes out."""
    named = {name for told in stories for entry in told.trained for name in find_referenced_objects(entry)}
    missing = len(named - set(recording.objects))
    if missing:
        raise UserError(f"{recording.path} lacks {missing} of {len(named)} images: record the run again, with its objects")


class RecordedTasks:
    """The curriculum as the recording shows it."""

    def __init__(self, stories: Iterable[Told]) -> None:
        self._by_group: dict[str, Task] = {}
        self.held_out: list[Task] = []
        evaluated: dict[str, dict[int, Task]] = {}
        for story in stories:
            request = story.request
            if request.split == "train":
                self._by_group.setdefault(request.group_id, request.task)
            else:
                name, _, number = request.episode_id.rpartition("-")
                evaluated.setdefault(name, {})[int(number) if number.isdigit() else len(evaluated[name])] = request.task
        if evaluated:
            fullest = max(evaluated.values(), key=len)
            self.held_out = [fullest[number] for number in sorted(fullest)]

    def task(self, number: int) -> Task:
        """The recorded task of that group; beyond the recording any will do."""
        return self._by_group.get(f"g{number:06d}") or Task(key="beyond-the-recording")

    def evaluation(self, count: int) -> list[Task]:
        return self.held_out[:count]
