"""Samples of training come from the distribution that is trained: refused at once where settings say otherwise."""

from __future__ import annotations

import anyio
import pytest

from fleetbus.bus.memory import MemoryServer
from fleetbus.bus.streams import plan_run
from fleetbus.config.check import check_trained_distribution
from fleetbus.config.settings import Configuration, EpisodeSettings
from fleetbus.errors import UserError
from fleetbus_workers.learner.curriculum import Curriculum
from fleetbus_workers.learner.scripted import ScriptedTrainer
from fleetbus_workers.learner.worker import run_learner
from fleetbus_workers.up.checks import check_everything

DISTORTING = {
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.1,
}


@pytest.mark.parametrize(("name", "value"), DISTORTING.items())
async def test_a_run_that_trains_refuses_to_sample_from_another_distribution(name: str, value: float) -> None:
    configuration = Configuration(episode=EpisodeSettings(**{name: value}))  # type: ignore[arg-type]
    line = rf"episode\.{name} = {value:g} samples from another distribution.*FLEETBUS_EPISODE_{name.upper()}$"
    with pytest.raises(UserError, match=line):
        check_everything(configuration)
    trainer, curriculum, drain = ScriptedTrainer(), Curriculum([], [], seed=1), anyio.Event()
    async with MemoryServer().connect("default", worker="l") as bus:
        await bus.declare(plan_run("default", lanes=1))
        with pytest.raises(UserError, match=line):
            await run_learner(
                bus,
                configuration=configuration,
                name="l",
                drain=drain,
                trainer=trainer,
                curriculum=curriculum,
            )
        assert (await bus.log_state()).last_sequence == 0


def test_temperature_is_the_trained_policy_s_own() -> None:
    check_trained_distribution(EpisodeSettings(temperature=0.7))
