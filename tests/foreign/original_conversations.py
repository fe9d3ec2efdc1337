"""Computes rewards of tau2-bench itself: ``python original_conversations.py DOMAIN EPISODES``, in its interpreter.

EPISODES is a file, ``[[ID, [ANSWER, ...]], ...]``: what user and agent answer, in the order in which they are asked; an answer
is a text, or calls ``[NAME, ARGUMENTS]``; after its answers everybody says "###STOP###". tau2's own orchestrator plays them and
its evaluation gives the reward. What only a model could judge is taken as true. Prints a list of numbers.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loguru import logger
from tau2.agent.base_agent import HalfDuplexAgent
from tau2.data_model.message import AssistantMessage, ToolCall, UserMessage
from tau2.data_model.simulation import RewardInfo
from tau2.data_model.tasks import RewardType
from tau2.evaluator.evaluator import EvaluationType, NLAssertionsEvaluator, evaluate_simulation
from tau2.orchestrator.orchestrator import Orchestrator
from tau2.registry import registry
from tau2.user.user_simulator_base import HalfDuplexUser

PAD = "###STOP###"


class Answering:
    """Half of a conversation: takes the next of the answers that both share."""

    answers: Iterator[Any]

    def get_init_state(self, message_history: Any = None) -> Any:
        return None

    def set_seed(self, seed: int) -> None:
        """Nothing is drawn."""


class Agent(Answering, HalfDuplexAgent):  # type: ignore[misc]
    def generate_next_message(self, message: Any, state: Any) -> Any:
        answer = next(self.answers)
        if isinstance(answer, str):
            return AssistantMessage(role="assistant", content=answer), state
        calls = [ToolCall(id=f"c{n}", name=name, arguments=arguments) for n, (name, arguments) in enumerate(answer)]
        return AssistantMessage(role="assistant", tool_calls=calls), state


class User(Answering, HalfDuplexUser):  # type: ignore[misc]
    def generate_next_message(self, message: Any, state: Any) -> Any:
        return UserMessage(role="user", content=next(self.answers)), state


def take_as_true(task: Any, full_trajectory: Any) -> Any:
    return RewardInfo(reward=1.0, nl_assertions=[], reward_breakdown={RewardType.NL_ASSERTION: 1.0})


def play(domain: str, task: Any, answers: list[Any]) -> float:
    environment = registry.get_env_constructor(domain)()
    agent, user = Agent(environment.get_tools(), environment.policy), User()
    agent.answers = user.answers = itertools.chain(answers, itertools.repeat(PAD))
    run = Orchestrator(domain, agent, user, environment, task, max_steps=200, max_errors=10).run()
    return float(evaluate_simulation(run, task, EvaluationType.ALL, False, domain).reward)


def main() -> None:
    domain, file = sys.argv[1:]
    logger.remove()
    NLAssertionsEvaluator.calculate_reward = take_as_true
    tasks = {task.id: task for task in registry.get_tasks_loader(domain)()}
    print(json.dumps([play(domain, tasks[key], answers) for key, answers in json.loads(Path(file).read_text())]))


if __name__ == "__main__":
    main()
