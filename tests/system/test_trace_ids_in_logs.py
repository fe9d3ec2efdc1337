"""JSON records about an episode or a session lead to their spans, as `fleetbus trace` derives them from the log; and a learner
says which settings differ from those that the log has."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from fleetbus.config.settings import EpisodeSettings, EvaluationSettings, LearnerSettings, LogSettings, RunSettings
from fleetbus.logs.setup import configure_logs
from fleetbus_schemas import Action, Task
from fleetbus_workers.environment.adapters.scripted import ScriptedEnvironment
from fleetbus_workers.environment.base import Step
from fleetbus_workers.inference.scripted import ScriptedSampler
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.observe.tracing.fold import LogTraces
from tests.support.small_deployment import RUN, SmallDeployment, build_configuration, small_deployment
from tests.support.stepwise_fixtures import TASK, CountingEnvironment, World, session_fixture
from tests.support.virtual_time import virtual_time

anyio_backend = virtual_time
log = structlog.get_logger()


class Talkative(ScriptedEnvironment):
    """Logs as an adapter does: it knows nothing of episodes."""

    async def step(self, *arguments: Any, **options: Any) -> Step:
        log.info("stepped")
        return await super().step(*arguments, **options)


class TalkativeSampler(ScriptedSampler):
    async def generate(self, *arguments: Any, **options: Any) -> Any:
        log.info("generated")
        return await super().generate(*arguments, **options)


@pytest.fixture
def records() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    configure_logs(LogSettings(format="json", level="debug"), stream=stream, run=RUN)
    yield stream
    structlog.contextvars.clear_contextvars()


def read(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def read_span_ids(fleet: SmallDeployment) -> dict[tuple[str, str], str]:
    traces = LogTraces(RUN)
    spans = [span async for entry in fleet.bus.scan([fleet.subjects.log]) for span in traces.add(entry)]
    return {(f"{span.trace_id:032x}", f"{span.span_id:016x}"): span.name for span in spans}


async def test_records_of_both_workers_name_the_spans_of_their_episode(records: io.StringIO) -> None:
    async with small_deployment() as fleet:
        fleet.environment("e1", make=Talkative)
        fleet.inference("i1", sampler=TalkativeSampler())
        await fleet.heard(*fleet.members.values())
        for number in range(4):
            await fleet.request(f"e{number}", task=Task(key="t"))
        await fleet.all_results(4)
        spans = await read_span_ids(fleet)
    said = [line for line in read(records) if "episode" in line]
    names = {(line["event"], spans.get((line.get("trace_id", ""), line.get("span_id", "")))) for line in said}
    assert names == {("stepped", "attempt"), ("episode finished", "attempt"), ("generated", "turn")}
    assert {line["episode"] for line in said} == {f"e{number}" for number in range(4)}
    assert len({line["trace_id"] for line in said}) == 4


class TalkativeWorld(World):
    def __call__(self) -> CountingEnvironment:
        class Talking(CountingEnvironment):
            async def step(self, action: Action) -> Step:
                log.info("stepped")
                return await super().step(action)

        return Talking(self)


async def test_records_of_a_session_name_the_span_of_its_call(records: io.StringIO) -> None:
    async with session_fixture() as here:
        here.worker("e1", TalkativeWorld())
        for _ in range(2):
            session = here.client.session()
            await session.request("open", task=TASK)
            await session.reset(seed=3)
            await session.step("one")
            await session.close()
        spans = await read_span_ids(here.fleet)
    said = [line for line in read(records) if line["event"] == "stepped"]
    assert [spans[line["trace_id"], line["span_id"]] for line in said] == ["step", "step"]
    assert len({line["session"] for line in said}) == 2
    assert not [line for line in read(records) if "session" not in line and "trace_id" in line]


async def test_a_learner_says_which_settings_changed_since_the_lineage_before(records: io.StringIO, tmp_path: Path) -> None:
    settings = LearnerSettings(steps=1, groups=1, group_size=2, checkpoint_every=1)
    tables: dict[str, Any] = {
        "run": RunSettings(name=RUN, folder=str(tmp_path)),
        "episode": EpisodeSettings(max_turns=2),
        "evaluation": EvaluationSettings(episodes=0),
    }
    async with small_deployment(build_configuration(learner=settings, **tables), published=False) as fleet:
        fleet.environment("e1")
        fleet.inference("i1")
        for number, steps in enumerate((1, 2)):
            changed = msgspec.structs.replace(settings, steps=steps)
            configuration = build_configuration(learner=changed, **tables)
            curriculum = Curriculum([Task(key="t", prompt="play")], [], seed=1)
            member = fleet.learner(f"l{number}", trainer=ScriptedTrainer(), curriculum=curriculum, configuration=configuration)
            await member.ended.wait()
    (differing,) = [line for line in read(records) if line["event"].startswith("settings differ")]
    assert differing["changed"] == {"learner.steps": "1 -> 2"} and differing["lineage"] == "l2"
