"""Decisions about a turn that all inference workers make alike: its seed, its pinned version, its room, its prompt."""

import hashlib
from collections.abc import Sequence

import msgspec

from fleetbus_schemas import NEW_ROOT, ChatMessage, Observation, SegmentOrigin
from fleetbus_workers.inference.base import Generation, RequestRefused, Template
from fleetbus_workers.inference.history_cache import History
from fleetbus_workers.inference.rendered_history import count_shared


class VersionSuperseded(Exception):
    """The pinned version will not come: versions never repeat, only the newest is loaded, and none is pinned before it was
    published."""


def check_pinned_version(pinned: int | None, generation: Generation) -> None:
    """Weights may have been swapped within the turn; raises `VersionSuperseded` then."""
    others = {span.version for span in generation.versions} - {pinned}
    if pinned is not None and others:
        raise VersionSuperseded(f"version {pinned} is pinned, and {max(others)} was loaded within the turn")


def find_lack_of_room(observation: Observation, added: int, tokens: int, max_model_len: int) -> str:
    """The error class of a prompt of ``added`` tokens that leaves no room for one of a model that nobody trains, if that is the
    model's limit and not its seat's; empty for all others, which end their episodes alike."""
    is_by_model = tokens >= max_model_len and observation.tokens_left > added
    return "seat_without_room" if is_by_model and not observation.trained else ""


def describe_lack_of_room(observation: Observation, tokens: int, max_model_len: int) -> str:
    """The reason why a first prompt leaves no room for a token: its length, and which limit it meets; empty for later turns,
    which use up what the episode has."""
    if observation.history_hash:
        return ""
    if tokens >= max_model_len:
        limit = f"the model takes {max_model_len:,} (inference.max_model_len)"
    else:
        limit = f"the episode may have {observation.tokens_left:,} (episode.max_episode_tokens)"
    return f"the prompt has {tokens:,} tokens; {limit}"


def compute_turn_seed(observation: Observation) -> int:
    """The seed of a turn: the same for every worker and every repetition of it."""
    name = f"{observation.sampling.seed}/{observation.episode_id}/{observation.turn}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def render_conversation(
    template: Template, observation: Observation, history: History, conversation: Sequence[ChatMessage]
) -> tuple[Observation, list[int]]:
    """The whole prompt as the template writes it; where it is not the history and more, a segment of this worker's own begins
    with it. Raises `RequestRefused`."""
    if observation.origin is not None and observation.origin.reason != "seat":
        raise RequestRefused("inference.reasoning = template renders the whole conversation, and a part of it was dropped")
    if any(message.images for message in conversation):
        raise RequestRefused("inference.reasoning = template renders text only, and the episode contains images")
    rendered = template.encode_conversation(conversation, history.tools)
    kept = count_shared(history.ids, rendered)
    if kept == len(history.ids):
        return observation, rendered
    reason = template.explain_rendering(conversation, rendered)
    origin = SegmentOrigin(parent=observation.segment if kept else NEW_ROOT, kept=kept, reason=reason)
    return msgspec.structs.replace(observation, segment=observation.segments, origin=origin), rendered
