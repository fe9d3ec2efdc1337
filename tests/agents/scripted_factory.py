"""Environments of the scripted agent, which posts its own reward."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetbus.config.settings import Configuration, EnvironmentSettings
from fleetbus_workers.environment.composed_reward import ComposedRewardFactory
from fleetbus_workers.environment.specs import build_environment_factory

AGENT = Path(__file__).with_name("scripted_agent.py")


def build_scripted_agents(weights: Mapping[str, float] | None) -> Any:
    """As `build_environment_factory`; with ``weights`` the reward is composed."""
    settings = Configuration(environment=EnvironmentSettings(agent_reward_url=True))
    spec = f"agent:{sys.executable} {AGENT}"
    factory = build_environment_factory(spec, verifier=None, configuration=settings)  # type: ignore[arg-type]
    return factory if weights is None else ComposedRewardFactory(factory, weights, None, max_chars=1000)
