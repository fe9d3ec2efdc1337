"""Trains by an example of docs/trainers.md with TRL's `GRPOTrainer`, unmodified, which samples by itself.

    python tests/trainers/train_with_environments.py MODEL OUTPUT_FOLDER STEPS EXAMPLE.py

What the reward function gave is written to OUTPUT_FOLDER/trained.jsonl, a line per step's batch.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import trl
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_template

from fleetbus_workers.environment.adapters.warehouse.tasks import build_train_tasks
from fleetbus_workers.environment.specs import build_environment_factory
from fleetbus_workers.trainers import trl_environment


def main(model: Path, output: Path, steps: int, example: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)

    class WritingEnvironments(trl_environment.FleetbusEnvironments):
        def reward(self, completions: Any, environments: Any, **given: Any) -> list[float | None]:
            rewards = super().reward(completions, environments, **given)
            calls = sum(len(message.get("tool_calls") or ()) for messages in completions for message in messages)
            step = given["trainer_state"].global_step + 1
            with (output / "trained.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "rewards": rewards, "excluded": self.excluded, "calls": calls}) + "\n")
            return rewards

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = qwen3_template  # the starter writes calls as Qwen does; TRL knows models by their templates
    tokenizer.chat_template = describe_tools(tokenizer.chat_template, anyio.run(read_prompt))
    read_config = partial(
        trl.GRPOConfig,
        per_device_train_batch_size=8,
        num_generations=4,
        max_steps=steps,
        max_completion_length=512,
        learning_rate=3e-4,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trl_environment.FleetbusEnvironments = WritingEnvironments  # type: ignore[misc]
    trl.GRPOConfig, trl.GRPOTrainer = read_config, partial(trl.GRPOTrainer, processing_class=tokenizer)
    names: dict[str, Any] = {}
    exec(compile(example.read_text(), example, "exec"), names)
    history = [entry for entry in names["trainer"].state.log_history if "reward" in entry]
    (output / "history.json").write_text(json.dumps(history))


async def read_prompt() -> str:
    """The words in which the starter was taught the tools of the warehouse: it calls none that are described in others."""
    factory: Any = build_environment_factory("warehouse", verifier=None)  # type: ignore[arg-type]
    async with getattr(factory, "run", nullcontext)():
        environment = factory()
        await environment.open(build_train_tasks(1, seed=0)[0])
        start = await environment.reset()
        await environment.close()
    return str(start.messages[0].content)


def describe_tools(template: str, words: str) -> str:
    before, _, rest = template.partition("{%- if tools %}")
    after = rest.partition("{%- for message in messages %}")[2]
    system = "{%- if tools %}{{ open('system') }}{% raw %}" + words + "{% endraw %}<|im_end|>\n{% endif %}\n"
    return before + system + "{%- for message in messages %}" + after


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
