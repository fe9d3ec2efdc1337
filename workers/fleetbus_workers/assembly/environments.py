"""The environments that the configuration names, open while a worker plays them; imported by the role that needs them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

from fleetbus.config.settings import Configuration
from fleetbus_workers.environment.adapter_context import EnvironmentFactory
from fleetbus_workers.environment.composed_reward import AsksJudge, ComposedRewardFactory
from fleetbus_workers.environment.isolation.verifier import Policy, Verifier, VerifierLimits
from fleetbus_workers.environment.keyed_specs import build_keyed_factory
from fleetbus_workers.environment.specs import build_environment_factory
from fleetbus_workers.judge.opening import open_judge, read_weights


@asynccontextmanager
async def open_environments(
    configuration: Configuration,
    *,
    specs: str = "",
    store_image: Any = None,
    sandbox: Policy = "auto",
    reuse_verifiers: bool = False,
    recorded_judge: AsksJudge | None = None,
) -> AsyncIterator[Any]:
    """A factory of environments by task, of ``specs`` or of those configured. ``store_image`` stores the pictures that they
    show; ``sandbox`` and ``reuse_verifiers`` are options of `Verifier`; ``recorded_judge`` stands for the one configured.
    Raises `UserError`."""
    limits = VerifierLimits(seconds=configuration.limits.verify)
    verifier = Verifier(limits, sandbox=sandbox, reuse_processes=reuse_verifiers)
    style = configuration.environment.prompt
    make_factory = partial(
        build_environment_factory,
        verifier=verifier,
        observation_bytes=configuration.environment.observation_bytes,
        prompt=None if style == "auto" else style,
        configuration=configuration,
        store_image=store_image if configuration.environment.images else None,
    )
    factory = build_keyed_factory(specs or configuration.run.environment, make_factory)
    async with verifier.run(), compose_rewards(factory, configuration, recorded_judge) as composed, composed.run():
        yield composed


@asynccontextmanager
async def compose_rewards(
    factory: EnvironmentFactory, configuration: Configuration, recorded_judge: AsksJudge | None = None
) -> AsyncIterator[EnvironmentFactory]:
    """The factory with rewards as ``reward`` says; itself where nothing is set. Raises `UserError`."""
    reward = configuration.reward
    async with open_judge(reward) if recorded_judge is None else nullcontext(recorded_judge) as judge:
        if judge is None and not reward.weights:
            yield factory
            return
        weights = read_weights(reward, judged=judge is not None)
        yield ComposedRewardFactory(
            factory, weights, judge, max_chars=reward.judge_max_chars, judges_groups=reward.judge_mode == "group"
        )
