"""Tasks of inspect_ai, played unmodified: solver, tools and scorers are the task's own.

The package runs one evaluation per process, so each episode has one, forked from a server that has imported everything: the
package, what it imports once it evaluates, and the packages that extend it, which it imports for every task. The policy is
the endpoint at ``base_url``; when it has no further turns, a sample is scored as it stands. Roles beside it (``grader``,
``user``) are models of their own where an argument ``role.NAME=MODEL`` names them, else the policy, untrained. An error of a
sample is raised: it has no score. See docs/decisions/0212-one-process-per-sample-of-inspect.md and
docs/decisions/0277-turns-that-run-out-are-a-limit-of-inspect.md.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from typing import Any

from fleetbus_process import EpisodeFailed, call_in_process, prepare_server

POLICY = "openai-api/fleetbus/policy"  # the provider openai asks for a response beside the task first
OTHER = f"{POLICY}:untrained"
ROLES = ("grader", "user")
OWN = ("role.", "scorer", "part")
"""Arguments that are not the task's: models of roles; the scorer whose value is the reward, and its part if it has several."""

EVALUATION = (
    *("inspect_ai", "inspect_ai.model", "inspect_ai.scorer", "openai.resources.chat.chat", "fastapi", "uvicorn"),
    *("inspect_ai.hooks", "inspect_ai.model._providers.openai_compatible", "inspect_ai.agent._acp.server", "rich.markdown"),
)
"""An evaluation imports these, some of them once it runs."""

OVER = "chatcmpl-0"
"""The id of the endpoint's answer when there are no further turns."""

SEED = 0
"""Before a task is loaded: where its data is shuffled, a place names the same sample in every process."""


@asynccontextmanager
async def open_environment(name: str, arguments: dict[str, Any]) -> AsyncIterator[Inspect]:
    """The task ``name``, as inspect eval takes it, with its arguments."""
    server = prepare_server([*EVALUATION, *(each.module for each in entry_points(group="inspect_ai"))])
    yield Inspect(server, name, arguments)


class Inspect:
    """One task; its samples are the tasks of fleetbus, by their place."""

    def __init__(self, server: Any, name: str, arguments: dict[str, Any]) -> None:
        self._server = server
        self._name = name
        self._arguments = arguments

    def list_tasks(self, count: int) -> list[dict[str, Any]]:
        from inspect_ai._eval.loader import load_tasks

        random.seed(SEED)
        [task] = load_tasks([self._name], select_own(self._arguments, own=False))
        samples = [task.dataset[index] for index in range(min(count, len(task.dataset)))]
        return [{"index": index, "prompt": show(sample.input)} for index, sample in enumerate(samples)]

    async def play(self, task: dict[str, Any], base_url: str) -> dict[str, Any]:
        index = int(task["config"]["index"])
        return {"reward": await call_in_process(self._server, evaluate, self._name, self._arguments, index, base_url)}


def evaluate(name: str, arguments: dict[str, Any], index: int, base_url: str) -> float:
    from inspect_ai import eval as evaluate_tasks
    from inspect_ai.model import get_model

    os.environ |= {"FLEETBUS_API_KEY": "in-the-path", "FLEETBUS_BASE_URL": base_url}
    named = {role: arguments.get(f"role.{role}") for role in ROLES}
    roles = {role: get_model(model) if model else build_model(OTHER) for role, model in named.items()}
    random.seed(SEED)
    with tempfile.TemporaryDirectory() as folder:
        [log] = evaluate_tasks(
            name, model=build_model(POLICY), model_roles=roles, task_args=select_own(arguments, own=False),
            limit=(index, index + 1), epochs=1, fail_on_error=True, retry_on_error=0, display="none", log_dir=folder,
        )  # fmt: skip
        if log.status != "success" or not log.samples or log.samples[0].error:
            raise EpisodeFailed(log.error.message if log.error else f"status {log.status}")
        return read_reward(log.samples[0].scores or {}, str(arguments.get("scorer", "")), str(arguments.get("part", "")))


def build_model(name: str) -> Any:
    """A model at the endpoint. Its last turn is a limit of the package's, for an agent's loop may have no end of its own; a
    scorer that asks then has no answer, and the sample an error."""
    from inspect_ai.model import get_model
    from inspect_ai.util import LimitExceededError

    def check(response: dict[str, Any]) -> None:
        if response["id"] == OVER:
            raise LimitExceededError("custom", value=0, limit=0, message="there are no further turns")

    model: Any = get_model(name, max_retries=0)
    model.api.on_response = check
    return model


def read_reward(scores: dict[str, Any], scorer: str, part: str) -> float:
    """The value of a scorer, the first if none is named, as the package turns it into a number."""
    from inspect_ai.scorer import value_to_float

    score = scores.get(scorer) if scorer else next(iter(scores.values()), None)
    if score is None:
        raise EpisodeFailed(f"no score {scorer!r}; there are {', '.join(scores) or 'none'}")
    value = score.value[part] if part else score.value
    if isinstance(value, dict | list):
        raise EpisodeFailed(f"the score has several parts, name one with part=: {value}")
    return float(value_to_float()(value))


def select_own(arguments: dict[str, Any], *, own: bool) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name.startswith(OWN) == own}


def show(given: Any) -> str:
    """The text of a sample's input, for people; the policy is shown what the task sends."""
    return given if isinstance(given, str) else "\n".join(message.text for message in given)
