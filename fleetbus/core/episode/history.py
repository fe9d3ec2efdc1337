"""The token history of an episode as a fold of its claims and Actions (docs/concepts/delivery.md, rule 3). Pure.

history(n) is history(n-1) cut at the turn where attempt n resumed, followed by attempt n's own Actions. Only this fold says
which Actions are trained; every part that needs an episode's tokens - inference, environment, learner, audit - uses it.
"""

from collections.abc import Container, Iterable, Sequence

import msgspec

from fleetbus_schemas import Action, ActionReference, AttemptStarted, ShownImage
from fleetbus_schemas.tokens import count_tokens, unpack_ids


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One Action of a history and where it stands in the log."""

    sequence: int
    lane: str
    action: Action

    @property
    def reference(self) -> ActionReference:
        return ActionReference(sequence=self.sequence, lane=self.lane, turn=self.action.turn)


def fold_history(claims: Sequence[AttemptStarted], actions: Iterable[Turn]) -> tuple[Turn, ...]:
    """The turns that the newest claim's attempt stands on, turn 0 first, without gaps.

    ``claims`` in log order. Actions without tokens (failed, or no room left) are no part of any history.
    """
    by_attempt: dict[int, dict[int, Turn]] = {}
    for turn in actions:
        if turn.action.sampled:
            by_attempt.setdefault(turn.action.attempt, {}).setdefault(turn.action.turn, turn)
    history: list[Turn] = []
    for claim in claims:
        del history[claim.resumed_at_turn :]
        own = by_attempt.get(claim.attempt, {})
        while (following := own.get(len(history))) is not None:
            history.append(following)
    return tuple(history)


def collect_token_ids(turns: Iterable[Turn]) -> list[int]:
    """All token ids of a history in order."""
    ids: list[int] = []
    for turn in turns:
        ids += unpack_ids(turn.action.prompt_delta)
        ids += unpack_ids(turn.action.sampled)
    return ids


def collect_images(turns: Iterable[Turn]) -> list[ShownImage]:
    """The images of a history in order, their places counted from its beginning."""
    images: list[ShownImage] = []
    length = 0
    for turn in turns:
        images += shift_images(turn.action.images, length)
        length += count_tokens(turn.action.prompt_delta) + count_tokens(turn.action.sampled)
    return images


def shift_images(images: Iterable[ShownImage], by: int) -> list[ShownImage]:
    """The same images with their places ``by`` tokens later."""
    return [ShownImage(object=image.object, start=image.start + by, stop=image.stop + by) for image in images]


def loss_mask(turns: Iterable[Turn], untrained: Container[int] = ()) -> list[bool]:
    """True for every sampled token of a history, False for every prompt token and those of turns that are not trained."""
    mask: list[bool] = []
    for number, turn in enumerate(turns):
        mask += [False] * count_tokens(turn.action.prompt_delta)
        mask += [number not in untrained] * count_tokens(turn.action.sampled)
    return mask


def list_versions(turns: Iterable[Turn]) -> tuple[int, ...]:
    """Those that sampled these turns, each once, ascending."""
    return tuple(sorted({span.version for turn in turns for span in turn.action.versions}))
