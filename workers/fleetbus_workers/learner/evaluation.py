"""Held-out tasks played with one pinned version: asked for like any episode, never trained."""

from collections.abc import Iterable, Mapping

import anyio

from fleetbus.core.algorithms.reward_components import MAX_ABS_REWARD, find_reward_problem, list_all_rewards
from fleetbus.core.training.evaluation_summary import is_success
from fleetbus.delivery.requests import NO_OPPONENTS, Requests
from fleetbus_schemas import GRADED, EpisodeFinished, EvaluationFinished, Task

ROOM_SECONDS = 60.0
"""How long an evaluation waits for room in the log: it holds up the next step, by which settled entries leave."""


class PendingEvaluation:
    """The results of one evaluation as they come in."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.results: dict[str, EpisodeFinished] = {}
        self.complete = anyio.Event()

    def add(self, result: EpisodeFinished) -> None:
        self.results.setdefault(result.episode_id, result)
        if len(self.results) >= self._count:
            self.complete.set()


class Evaluations:
    """Evaluations that are under way, several at a time. A result is of the one that asked for its episode, whatever split and
    group it names: who stores results could hold up an evaluation by them, or add episodes to it."""

    def __init__(self, requests: Requests, *, success_threshold: float = 1.0, max_abs_reward: float = MAX_ABS_REWARD) -> None:
        self._requests = requests
        self._max_abs_reward = max_abs_reward
        self._success_threshold = success_threshold
        self._pending: dict[str, PendingEvaluation] = {}
        """By episode."""

    def expects(self, episode_id: str) -> bool:
        """True for an episode of an evaluation that is under way."""
        return episode_id in self._pending

    def add_result(self, result: EpisodeFinished) -> None:
        self._pending[result.episode_id].add(result)

    async def play(
        self,
        name: str,
        tasks: list[Task],
        *,
        lineage: str,
        step: int,
        version: int,
        temperature: float,
        opponents: Mapping[str, int] = NO_OPPONENTS,
    ) -> EvaluationFinished | None:
        """Play one episode per task with ``version``, seats of leagues by ``opponents``: the verdict; None if the log has
        no room for one of them within a minute. Every episode ends by its deadline."""
        group, pending = f"{lineage}-{name}", PendingEvaluation(len(tasks))
        asked = {f"{group}-{index:04d}": task for index, task in enumerate(tasks)}
        self._pending |= dict.fromkeys(asked, pending)
        for index, (episode_id, task) in enumerate(asked.items()):
            with anyio.move_on_after(ROOM_SECONDS) as waiting:
                await self._requests.wait_for_room()
            if waiting.cancelled_caught:
                self._forget(asked)
                return None
            request = self._requests.build_request(
                task,
                episode_id=episode_id,
                group_id=group,
                sample_index=index,
                group_size=len(tasks),
                split="eval",
                lineage=lineage,
                version=version,
                pinned=True,
                temperature=temperature,
                opponents=opponents,
            )
            stored = await self._requests.publish(request)
            if stored.result is not None:
                pending.add(stored.result)
        await pending.complete.wait()
        self._forget(asked)
        graded = [each for each in pending.results.values() if each.outcome in GRADED and each.reward is not None]
        graded = [each for each in graded if not find_reward_problem(list_all_rewards(each), self._max_abs_reward)]
        rewards = [result.reward for result in graded if result.reward is not None]
        successes = sum(is_success(result, self._success_threshold) for result in graded)
        return EvaluationFinished(
            lineage=lineage,
            step=step,
            version=version,
            name=name,
            episodes=len(tasks),
            graded=len(rewards),
            success=successes / max(len(graded), 1),
            successes=successes,
            mean_reward=sum(rewards) / max(len(rewards), 1),
            temperature=temperature,
            tasks=len({task.key for task in tasks}),
        )

    def _forget(self, episodes: Iterable[str]) -> None:
        for episode_id in episodes:
            del self._pending[episode_id]
