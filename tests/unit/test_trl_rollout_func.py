"""`FleetbusRollouts` on a deployment in one process whose environments fail, with a trainer that takes its rows."""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest

from fleetbus.client.rollouts import RolloutGroup
from fleetbus.errors import UserError
from fleetbus_schemas import Task
from fleetbus_workers.trainers import trl_rollout_func
from fleetbus_workers.trainers.trl_rollout_func import FleetbusRollouts
from tests.unit.test_trainer_formats import episode

TRAINER = SimpleNamespace(args=SimpleNamespace(temperature=0.7))


def make(patch: pytest.MonkeyPatch, play: Callable[[Task, int], RolloutGroup], **arguments: Any) -> FleetbusRollouts:
    """Groups come from ``play(task, size)`` instead of from workers."""
    tasks = [{"key": key, "prompt": "Count.", "env_key": "x"} for key in ("a", "b")]
    rollouts = FleetbusRollouts(tasks=tasks, name="r1", publish=False, **arguments)
    rollouts._bus = object()  # type: ignore[assignment]
    patch.setattr(
        trl_rollout_func, "rollouts", lambda bus, configuration, tasks, group_size, **_: Groups(tasks, group_size, play)
    )
    return rollouts


class Groups:
    def __init__(self, tasks: list[Task], size: int, play: Callable[[Task, int], RolloutGroup]) -> None:
        self._groups = [play(task, size) for task in tasks]

    async def __aenter__(self) -> Groups:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def __aiter__(self) -> Groups:
        return self

    async def __anext__(self) -> RolloutGroup:
        if not self._groups:
            raise StopAsyncIteration
        return self._groups.pop()


def test_rows_are_in_the_order_of_the_prompts_and_tasks_are_played_as_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[tuple[str, int]] = Counter()

    def play(task: Task, size: int) -> RolloutGroup:
        asked[task.key, size] += 1
        return RolloutGroup(task=task, episodes=tuple(episode(1.0 if task.key == "a" else 0.5) for _ in range(size)))

    rollouts = make(monkeypatch, play)
    rows = rollouts(["a", "a", "b", "b"], TRAINER)
    assert rows["episode_reward"] == [1.0, 1.0, 0.5, 0.5]
    assert asked == {("a", 2): 1, ("b", 2): 1}
    rollouts.close()


def test_only_what_failed_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def play(task: Task, size: int) -> RolloutGroup:
        asked.append((task.key, size))
        failed = size == 4
        return RolloutGroup(task=task, episodes=(episode(None if failed else 0.0), *[episode(1.0)] * (size - 1)))

    rollouts = make(monkeypatch, play)
    rows = rollouts(["a"] * 4, TRAINER)
    assert sorted(rows["episode_reward"]) == [0.0, 1.0, 1.0, 1.0]
    assert asked == [("a", 4), ("a", 1)]
    assert rollouts.excluded == {"env_failed": 1}
    rollouts.close()


def test_a_row_that_failed_each_time_is_not_trained_and_has_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(task: Task, size: int) -> RolloutGroup:
        return RolloutGroup(task=task, episodes=tuple(episode(None if task.key == "b" else 1.0) for _ in range(size)))

    rollouts = make(monkeypatch, play, retries=1)
    rows = rollouts(["b", "a"], TRAINER)
    assert rows["episode_reward"] == [None, 1.0]
    assert rows["env_mask"][0] == [0] and rows["logprobs"][0] == [0.0]
    assert len(rows["completion_ids"][0]) == len(rows["prompt_ids"][0]) == 1
    assert rollouts.reward([], rows["episode_reward"]) == [None, 1.0]
    assert rollouts.excluded == {"env_failed": 2}
    rollouts.close()


def test_a_batch_of_failures_alone_is_an_error_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = make(monkeypatch, lambda task, size: RolloutGroup(task=task, episodes=(episode(None),) * size), retries=0)
    with pytest.raises(RuntimeError, match="no episode of 2 was played: env_failed"):
        rollouts(["a", "a"], TRAINER)
    rollouts.close()


def test_a_prompt_of_another_data_set_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = make(monkeypatch, lambda task, size: RolloutGroup(task=task, episodes=()))
    with pytest.raises(UserError, match="'elsewhere' is the key of no task"):
        rollouts(["elsewhere"], TRAINER)


def test_an_episode_without_a_token_that_is_trained_is_no_row_of_trls(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(task: Task, size: int) -> RolloutGroup:
        empty = episode(1.0)
        untrained = msgspec.structs.replace(empty.sequences[0], loss_mask=(False,) * len(empty.ids))
        empty = msgspec.structs.replace(empty, sequences=(untrained,))
        return RolloutGroup(task=task, episodes=(empty, *[episode(0.5)] * (size - 1)))

    rollouts = make(monkeypatch, play, retries=0)
    rows = rollouts(["a", "a"], TRAINER)
    assert sorted(map(str, rows["episode_reward"])) == ["0.5", "None"]
    assert all(rows["completion_ids"])
    rollouts.close()


def test_an_episode_of_several_sequences_is_no_row_of_trls(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(task: Task, size: int) -> RolloutGroup:
        whole = episode(1.0)
        cut = msgspec.structs.replace(whole, sequences=whole.sequences * 2)
        return RolloutGroup(task=task, episodes=(cut, *[episode(0.5)] * (size - 1)))

    rollouts = make(monkeypatch, play, retries=0)
    assert sorted(map(str, rollouts(["a", "a"], TRAINER)["episode_reward"])) == ["0.5", "None"]
    with pytest.raises(RuntimeError, match="it has 2 sequences, and a row takes one: TrlRollouts makes several"):
        rollouts(["a"], TRAINER)
    rollouts.close()


@pytest.mark.parametrize("shows_images", [False, True])
def test_an_episode_with_ids_that_the_model_does_not_have_is_no_row_of_trls(
    monkeypatch: pytest.MonkeyPatch, shows_images: bool
) -> None:
    """Whoever holds an inference worker's key may store them: a look-up of their embeddings ends the trainer."""

    def play(task: Task, size: int) -> RolloutGroup:
        ids = (1, 2, 3, 4, 5, 7)
        return RolloutGroup(task=task, episodes=(episode(1.0, ids=ids), *[episode(0.5)] * (size - 1)))

    config = SimpleNamespace(vocab_size=7)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=7)) if shows_images else config
    rollouts = make(monkeypatch, play, retries=0)
    rows = rollouts(["a", "a"], SimpleNamespace(args=TRAINER.args, model=SimpleNamespace(config=config)))
    assert sorted(map(str, rows["episode_reward"])) == ["0.5", "None"]
    assert max(max(row) for row in rows["completion_ids"]) < 7
    with pytest.raises(RuntimeError, match="token id 7 is not below 7"):
        rollouts(["a"], SimpleNamespace(args=TRAINER.args, model=SimpleNamespace(config=config)))
    rollouts.close()


class Publisher:
    """Counts versions."""

    version = 0

    async def publish(self, tensors: Any, *, step: int) -> int:
        assert not isinstance(tensors, Iterator), "all of the model would be copied into this machine's memory"
        self.version += 1
        return self.version


def build_trainer(step: int, **model: Any) -> SimpleNamespace:
    accelerator = SimpleNamespace(
        distributed_type=SimpleNamespace(value="NO"), is_main_process=model.pop("first", True), unwrap_model=lambda each: each
    )
    named = SimpleNamespace(named_parameters=lambda: iter(()), **model)
    state = SimpleNamespace(global_step=step)
    return SimpleNamespace(args=TRAINER.args, accelerator=accelerator, model=named, state=state)


def make_publishing(patch: pytest.MonkeyPatch) -> FleetbusRollouts:
    pytest.importorskip("accelerate")
    rollouts = make(patch, lambda task, size: RolloutGroup(task=task, episodes=(episode(1.0),) * size))
    publisher = Publisher()

    async def open_publisher(bus: object, configuration: object) -> Publisher:
        return publisher

    patch.setattr(trl_rollout_func, "open_publisher", open_publisher)
    patch.setattr(rollouts, "_connect", lambda role: None)
    rollouts._publish = True
    return rollouts


def test_weights_are_published_once_a_step_and_anew_for_another_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = make_publishing(monkeypatch)
    trainer = build_trainer(0)
    assert [rollouts._publish_weights(trainer) for _ in range(2)] == [1, 1]
    trainer.state.global_step = 1
    assert rollouts._publish_weights(trainer) == 2
    other = build_trainer(1, name="another model")
    assert rollouts._publish_weights(other) == 3
    rollouts.close()


@pytest.mark.parametrize("first", [True, False])
def test_an_adapter_is_refused_in_every_process(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    rollouts = make_publishing(monkeypatch)
    with pytest.raises(UserError, match="an adapter's weights are not published alone"):
        rollouts._publish_weights(build_trainer(0, first=first, peft_config={}))
    rollouts.close()


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_a_connection_is_made_leaves_nothing_that_holds_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = anyio.Event()

    @asynccontextmanager
    async def connect(*_: object, **__: object) -> AsyncIterator[None]:
        main = threading.main_thread().ident or 0
        while sys._current_frames()[main].f_code is not threading.Condition.wait.__code__:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        await anyio.sleep(0.2)  # a signal that comes just before a thread waits for a lock does not wake it
        signal.pthread_kill(main, signal.SIGINT)
        await answered.wait()
        yield

    rollouts = make(monkeypatch, lambda task, size: RolloutGroup(task=task, episodes=()))
    monkeypatch.setattr(trl_rollout_func, "connect", connect)
    monkeypatch.setattr(trl_rollout_func, "resolve_server_url", lambda configuration: "nats://host")
    with pytest.raises(KeyboardInterrupt):
        rollouts._connect("operator")
    closing = threading.Thread(target=rollouts.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


def test_a_batch_that_nobody_plays_is_told_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    told = anyio.Event()
    rollouts = make(monkeypatch, lambda task, size: pytest.fail("unreachable"))

    async def play(*_: Any) -> dict[str, list[Any]]:
        with anyio.fail_after(10):
            await told.wait()
        return {}

    monkeypatch.setattr(rollouts, "_play", play)
    monkeypatch.setattr(trl_rollout_func, "TOLD_EVERY_SECONDS", 0.01)
    monkeypatch.setattr(trl_rollout_func, "log", SimpleNamespace(warning=lambda *_, **__: told.set()))
    assert rollouts._call(rollouts._play_and_tell) == {}
