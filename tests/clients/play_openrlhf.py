"""OpenRLHF's own multi-turn executor on environments under faults, for a Python with it and fleetbus:
``play_openrlhf.py FACTS``; see `test_trainers.py`. What stands in is the engine that samples.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripted_policy import open_tokenizer, sample, tell

from fleetbus_workers.trainers.openrlhf import AgentExecutor

MAX_LENGTH = 4096


class Engine:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def generate(self, ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        sampled, logprobs = sample(self._tokenizer, ids)
        output = SimpleNamespace(
            token_ids=sampled,
            text=self._tokenizer.decode(sampled[:-1]),  # vLLM leaves out the end that it stopped at, unless it is asked for it
            finish_reason="stop",
            logprobs=[{token: SimpleNamespace(logprob=value)} for token, value in zip(sampled, logprobs, strict=True)],
        )
        return SimpleNamespace(outputs=[output])


async def play(facts: dict[str, Any]) -> None:
    os.environ |= {"FLEETBUS_NATS_URL": facts["url"], "FLEETBUS_RUN_NAME": facts["run"], "FLEETBUS_RUN_TASKS": facts["tasks"]}
    tokenizer = open_tokenizer()
    executor, engine = AgentExecutor(), Engine(tokenizer)
    enough, played = Path(facts["enough"]), 0
    while played < facts["episodes"] or not enough.exists():  # noqa: ASYNC240
        calls = [
            executor.execute("unused", "t", SimpleNamespace(max_tokens=64, logprobs=1), MAX_LENGTH, tokenizer, engine)
            for _ in range(facts["parallel"])
        ]
        for response in await asyncio.gather(*calls):
            ids, ranges = response["observation_tokens"], response["action_ranges"]
            own = {place for start, end in ranges for place in range(start, end)}
            start = ranges[0][0]
            ends = [tokenizer.eos_token_id] * 2
            assert all(ids[place : place + 2] != ends for place in range(len(ids))), "a turn ends twice"
            mask = [int(place in own) for place in range(start, len(ids))]
            tell(tokenizer, ids[start:], mask, response["rollout_log_probs"][start:], response["reward"])
            played += 1


if __name__ == "__main__":
    asyncio.run(play(json.loads(sys.argv[1])))
