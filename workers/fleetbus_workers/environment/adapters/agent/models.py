"""Answers to what clients ask of models beside their calls: which there are, and how many tokens a call has. Pure.

There is one model, the policy. Calls may name any, so any name is described.
"""

from fleetbus_schemas.names import is_name
from fleetbus_workers.environment.adapters.agent.dialects import gemini, messages, responses
from fleetbus_workers.environment.adapters.agent.dialects.base import Dialect, InvalidCall

MODEL = "policy"
UNTRAINED_MODEL = "policy:untrained"
"""A call that asks for it is answered by the policy as all are, and not trained: roles beside the trained one."""

SEAT_PREFIX = "policy:seat:"
"""Before the name of a seat in the model that a call asks for: an agent whose calls are of several parts of the episode."""

OTHER_SEAT = "other"
"""The seat of calls that name none, in a session whose first call named one."""

BYTES_OF_A_TOKEN = 4

COUNTS: dict[str, Dialect] = {
    "/v1/messages/count_tokens": messages,
    "/v1/responses/input_tokens": responses,
    "/v1beta/models/{model}:countTokens": gemini,
    "/v1/models/{model}:countTokens": gemini,
}
"""The paths on which the tokens of a call are counted, and who asks there."""


def find_seat(model: str) -> str:
    """The seat that a call is of; empty if its model names none. Raises `InvalidCall` for what cannot be a name."""
    if not model.startswith(SEAT_PREFIX):
        return ""
    name = model.removeprefix(SEAT_PREFIX)
    if not is_name(name):
        raise InvalidCall(f"the model {model[:200]!r} names no seat: it must be 1 to 128 letters, digits, '-' or '_'")
    return name


def describe_model(name: str = MODEL) -> dict[str, object]:
    """A model as all clients read it: OpenAI's, Anthropic's and Google's ask on one path."""
    anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    google = {"name": f"models/{name}", "displayName": name, "version": "1", "supportedGenerationMethods": methods}
    return {"id": name, "object": "model", "created": 0, "owned_by": "fleetbus", **anthropic, **google}


def list_models() -> dict[str, object]:
    """All models, for the same clients."""
    models = [describe_model()]
    return {"object": "list", "data": models, "models": models, "has_more": False, "first_id": MODEL, "last_id": MODEL}


def estimate_tokens(body: bytes) -> dict[str, object]:
    """The tokens of a call, for every protocol: clients decide by it when to shorten their history."""
    tokens = len(body) // BYTES_OF_A_TOKEN
    return {"object": "response.input_tokens", "input_tokens": tokens, "totalTokens": tokens}
