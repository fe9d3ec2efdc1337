"""ms-swift's own gym scheduler on environments under faults, for a Python with it and fleetbus: ``play_ms_swift.py FACTS``; see
`test_trainers.py`. What stands in is the engine that samples.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

from scripted_policy import open_tokenizer
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RequestConfig,
    RolloutInferRequest,
    UsageInfo,
)
from swift.rollout.multi_turn import GYMScheduler

import fleetbus_workers.trainers.ms_swift  # noqa: F401

MAX_TURNS = 50


class Engine:
    """What the scheduler uses of ``GRPOVllmEngine``."""

    template = None

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    async def infer_async(self, request: RolloutInferRequest, config: RequestConfig, **_: Any) -> ChatCompletionResponse:
        said = sum(message["role"] == "assistant" for message in request.messages)
        text = f"step {said + 1}"
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        message = ChatMessage(role="assistant", content=text)
        choice = ChatCompletionResponseChoice(index=0, message=message, finish_reason="stop", logprobs=None, token_ids=ids)
        return ChatCompletionResponse(model="scripted", choices=[choice], usage=UsageInfo(0, 0, 0))


async def play(facts: dict[str, Any]) -> None:
    tokenizer = open_tokenizer()
    scheduler = GYMScheduler(Engine(tokenizer), max_turns=MAX_TURNS, gym_env="fleetbus")
    enough, played = Path(facts["enough"]), 0
    where = {name: facts[name] for name in ("url", "run", "tasks")}
    environment = {"name": "fleetbus", "task_key": "t", "max_turns": MAX_TURNS, **where}
    while played < facts["episodes"] or not enough.exists():  # noqa: ASYNC240
        requests = [
            RolloutInferRequest(
                messages=[{"role": "user", "content": "unused"}], data_dict={"env_config": environment}, uuid=uuid4().hex
            )
            for _ in range(facts["parallel"])
        ]
        outputs = await asyncio.gather(*[scheduler.run(request, RequestConfig()) for request in requests])
        for output in outputs:
            assert len(output.response_token_ids) == len(output.response_loss_mask) == output.rollout_infos["num_turns"]
            sampled = [tokenizer.decode(ids, skip_special_tokens=True) for ids in output.response_token_ids]
            observed = [each["content"] for each in output.messages if each["role"] == "user"][1:]
            line = {"sampled": sampled, "observed": observed, "reward": output.rollout_infos["total_reward"]}
            print(json.dumps(line), flush=True)
            played += 1


if __name__ == "__main__":
    asyncio.run(play(json.loads(sys.argv[1])))
