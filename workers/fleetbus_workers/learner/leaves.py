"""An episode's leaves as the trainer sees them: one sequence each, and every sampled token trained in the first that holds it.

What is known of an episode's tokens stands in arrays over the tokens of all its turns; a leaf is a choice of their places.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetbus.core.episode.segments import Segment, Span, find_leaves, fold_segments, place_in_segment, split_first
from fleetbus_schemas import Action
from fleetbus_workers.images.placed_image import PlacedImage
from fleetbus_workers.learner.base import TrainingSequence


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """A segment that is a sequence of its own, and its spans in parts: False where a leaf before this one holds the tokens.
    ``is_only``: the episode has no other segment."""

    segment: Segment
    parts: list[tuple[Span, bool]]
    is_only: bool = False

    @property
    def places(self) -> NDArray[np.int64]:
        """[T]: where its tokens stand among those of all turns."""
        return np.concatenate([np.arange(*span) for span, _ in self.parts]) if self.parts else np.zeros(0, np.int64)

    @property
    def first(self) -> NDArray[np.bool_]:
        """[T]: False where a leaf before this one holds the token."""
        return np.repeat([first for _, first in self.parts], [stop - start for (start, stop), _ in self.parts]).astype(bool)


def list_leaves(actions: Sequence[Action], unrewarded: frozenset[int] = frozenset()) -> tuple[Leaf, ...]:
    """The leaves of the turns of one episode, by number of their segment, without those of which all turns
    are ``unrewarded``: another model may have sampled them, with token ids of its own. Raises `SegmentError` if they are no
    tree."""
    segments = fold_segments(actions)
    leaves = [leaf for leaf in find_leaves(segments) if not unrewarded.issuperset(leaf.turns)]
    return tuple(
        Leaf(segment=leaf, parts=parts, is_only=len(segments) == 1)
        for leaf, parts in zip(leaves, split_first(leaves), strict=True)
    )


def is_whole(leaves: Sequence[Leaf]) -> bool:
    """True if the tokens of all turns are one sequence."""
    return any(leaf.is_only for leaf in leaves)


def split_sequence(whole: TrainingSequence, leaves: Sequence[Leaf]) -> list[TrainingSequence]:
    """One sequence per leaf of the arrays over all turns; ``whole`` itself if the episode has one segment only."""
    if is_whole(leaves):
        return [whole]
    return [_take_leaf(whole, leaf) for leaf in leaves]


def _take_leaf(whole: TrainingSequence, leaf: Leaf) -> TrainingSequence:
    places = leaf.places
    mask = whole.loss_mask[places] & leaf.first
    images: list[PlacedImage] = place_in_segment(leaf.segment, whole.images)
    return msgspec.structs.replace(
        whole,
        segment=leaf.segment.number,
        ids=whole.ids[places],
        loss_mask=mask,
        logprobs=np.where(mask, whole.logprobs[places], np.float32(0)),
        advantages=np.where(mask, whole.advantages[places], np.float32(0)),
        versions=np.where(mask, whole.versions[places], np.int32(-1)),
        images=tuple(images),
        places=places,
    )
