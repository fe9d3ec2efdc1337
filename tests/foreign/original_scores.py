"""Computes the scores of `inspect_ai` itself: ``python original_scores.py TASK EPISODES PAD PART``, in its interpreter.

EPISODES is a file, ``[[INDEX, [ANSWER, ...]], ...]``, as in original_rewards.py; after its answers an episode is answered with
PAD, which is JSON. The model is the package's own `mockllm`. Prints a list of scores as numbers, null where an evaluation
failed.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inspect_ai import eval as evaluate
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import value_to_float


def build_outputs(answers: list[Any], pad: Any) -> Iterator[ModelOutput]:
    for number, answer in enumerate(itertools.chain(answers, itertools.repeat(pad))):
        if isinstance(answer, str):
            output = ModelOutput.from_content("mockllm", answer)
        else:
            output = ModelOutput.for_tool_call("mockllm", *answer[0], tool_call_id=f"c{number}")
            output.choices[0].message.content = ""  # as the policy's: nothing but the call
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)  # it would fetch a tokenizer to count
        yield output


def score(task: str, index: int, answers: list[Any], pad: Any, part: str, folder: str) -> float | None:
    model = get_model("mockllm/model", custom_outputs=build_outputs(answers, pad), memoize=False)
    random.seed(0)  # a task may shuffle its data each time
    [log] = evaluate(
        task, model=model, model_roles={"user": model, "grader": model}, limit=(index, index + 1), epochs=1, display="none",
        log_dir=folder,
    )  # fmt: skip
    if log.status != "success" or not log.samples or log.samples[0].error:
        return None
    value = next(iter(log.samples[0].scores.values())).value
    return float(value_to_float()(value[part] if part else value))


def main() -> None:
    task, file, pad, part = sys.argv[1:]
    episodes = json.loads(Path(file).read_text())
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps([score(task, index, answers, json.loads(pad), part, folder) for index, answers in episodes]))


if __name__ == "__main__":
    main()
