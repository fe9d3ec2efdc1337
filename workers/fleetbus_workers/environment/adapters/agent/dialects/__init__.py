"""The protocols that agents speak to language models, by the path of their endpoint."""

from fleetbus_workers.environment.adapters.agent.dialects import chat_completions, gemini, messages, responses
from fleetbus_workers.environment.adapters.agent.dialects.base import Dialect

DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": chat_completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/v1beta/models/{model}:{method}": gemini,
    "/v1/models/{model}:{method}": gemini,
}
