"""verifiers' ToolEnv: its own loop, evaluated on one example."""

import asyncio

import verifiers as vf
from common import KEY, PROMPT, URL, look
from datasets import Dataset
from openai import AsyncOpenAI


async def main() -> None:
    rubric = vf.Rubric(funcs=[lambda completion, **_: 1.0])
    tasks = Dataset.from_list([{"question": PROMPT, "answer": "60"}])
    environment = vf.ToolEnv(tools=[look], eval_dataset=tasks, rubric=rubric, max_turns=10)
    client = AsyncOpenAI(base_url=URL, api_key=KEY)
    outcome = await environment.evaluate(client, "policy", num_examples=1, rollouts_per_example=1)
    print(outcome)


asyncio.run(main())
