"""The environment server that prime-rl starts and the client that its orchestrator asks for episodes, both verifiers' own, on
environments under faults, for a Python with it and fleetbus: ``play_prime_rl.py FACTS``; see `test_trainers.py`. What
stands in is the server that samples.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from scripted_policy import STARTER, open_tokenizer, sample, tell
from verifiers.v1.serve import EnvClient, EnvServer
from verifiers.v1.utils.loaders import resolve_env_config

NAMES = "FleetbusEnv, FleetbusHarness, FleetbusTaskset"


def build_engine(tokenizer: Any) -> web.Application:
    """What verifiers' training client uses of vLLM's server."""

    async def generate(request: web.Request) -> web.Response:
        ids, logprobs = sample(tokenizer, (await request.json())["token_ids"])
        content = [{"token": f"token_id:{token}", "logprob": value} for token, value in zip(ids, logprobs, strict=True)]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
        return web.json_response({"request_id": "r", "choices": [choice]})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "max_model_len": 4096}]})

    application = web.Application()
    application.add_routes([web.post("/inference/v1/generate", generate), web.get("/v1/models", models)])
    return application


async def play(facts: dict[str, Any]) -> None:
    tokenizer = open_tokenizer()
    runner = web.AppRunner(build_engine(tokenizer))
    await runner.setup()
    await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
    port = site._server.sockets[0].getsockname()[1]
    plugin = Path(facts["folder"]) / "fleet_tasks.py"
    plugin.write_text(f"from fleetbus_workers.trainers.prime_rl import {NAMES}\n__all__ = {NAMES.split(', ')}\n")
    sys.path.insert(0, facts["folder"])
    where = {name: facts[name] for name in ("url", "run", "tasks")}
    config = resolve_env_config({"taskset": {"id": "fleet_tasks", **where}})
    server = EnvServer(config, address="tcp://127.0.0.1:0")
    serving = asyncio.create_task(server.run())
    client = EnvClient(server.address)
    await client.wait_for_server_startup(60)
    policy = vf.TrainClientConfig(base_url=f"http://127.0.0.1:{port}/v1", renderer_model_name=str(STARTER))
    (task,) = vf.load_taskset(config.taskset)
    enough, played = Path(facts["enough"]), 0
    while played < facts["episodes"] or not enough.exists():  # noqa: ASYNC240
        calls = [client.run(policy, "policy", vf.SamplingConfig(), task.data.model_dump()) for _ in range(facts["parallel"])]
        for episode in await asyncio.gather(*calls):
            assert episode.ok, episode.model_dump_json(include={"errors"})
            (trace,) = episode.traces
            (branch,) = trace.branches
            start = branch.sampled_mask.index(True)
            columns = branch.token_ids[start:], [int(own) for own in branch.sampled_mask[start:]], branch.logprobs[start:]
            tell(tokenizer, *columns, trace.reward)
            played += 1
    await client.close()
    serving.cancel()
    await asyncio.wait([serving])
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(play(json.loads(sys.argv[1])))
