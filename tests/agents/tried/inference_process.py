"""An inference worker of the policy that plays agents as shipped, to be killed: ``... RUN NAME URL POLICY SECONDS``."""

from __future__ import annotations

import os
import sys

import anyio

from fleetbus.auth.access import build_access
from fleetbus.bus.nats import connect
from fleetbus.client.blocking import AUTH_VARIABLE
from fleetbus.config.settings import Configuration, InferenceSettings, RunSettings
from fleetbus_workers.inference.worker import run_inference
from tests.agents.tried.policy import PlayingSampler, ShownTemplate

MAX_MODEL_LEN = 1 << 20


async def main(run: str, name: str, url: str, policy: str, seconds: str) -> None:
    configuration = Configuration(run=RunSettings(name=run), inference=InferenceSettings(max_model_len=MAX_MODEL_LEN))
    sampler, template, drain = PlayingSampler(policy, float(seconds)), ShownTemplate(), anyio.Event()
    access = build_access("inference", os.environ.get(AUTH_VARIABLE, ""), run)
    async with connect(url, run=run, role="inference", worker=name, **access) as bus:
        await run_inference(bus, configuration=configuration, name=name, drain=drain, sampler=sampler, template=template)


if __name__ == "__main__":
    run, name, url, policy, seconds = sys.argv[1:]
    anyio.run(main, run, name, url, policy, seconds)
