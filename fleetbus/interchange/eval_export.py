"""Episodes as a log of Inspect (``.eval``): a zip of JSON files that Inspect View opens. Blocking; needs no package of Inspect.

A task is a sample, and its episodes are that sample's epochs. The reward is the score; an outcome without a grade is an error.
"""

from __future__ import annotations

import math
import os
import time
import zipfile
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from fleetbus.interchange.episode_facts import find_episode_id
from fleetbus.interchange.eval_samples import build_sample, build_summary
from fleetbus.interchange.times import format_time
from fleetbus.recording.episodes import Transcript

LOG_VERSION = 2
MODEL_PROVIDER = "fleetbus/"
"""Before the name of the policy: Inspect's names of models have a provider."""

MAX_NAME = 200
"""Longest name of a sample: it names a file."""


class EvalWriter:
    """Writes a log, as a context: `add` takes one episode after another. Nothing is at ``file`` before the end."""

    def __init__(self, file: Path, *, run: str, version: str) -> None:
        self._file = file
        self._part = file.with_name(f"{file.name}.{os.getpid()}.part")
        self._run = run
        self._version = version
        self._summaries: list[dict[str, Any]] = []
        self._epochs: Counter[str] = Counter()
        self._usage: dict[str, Counter[str]] = {}
        self._rewards: list[float] = []
        self._environments: Counter[str] = Counter()
        self._policies: Counter[str] = Counter()

    @property
    def written(self) -> int:
        """Number of episodes so far."""
        return len(self._summaries)

    def __enter__(self) -> EvalWriter:
        self._zip = zipfile.ZipFile(self._part, "w", zipfile.ZIP_DEFLATED)
        return self

    def add(self, transcript: Transcript) -> None:
        """Write an episode as a sample."""
        request, result = transcript.request, transcript.result
        key = result.task_key if result is not None else request.task.key if request is not None else ""
        name = build_name(key or find_episode_id(transcript))
        self._epochs[name] += 1
        policy = request.policy if request is not None else "default"
        model = MODEL_PROVIDER + policy
        sample = build_sample(transcript, self._run, name=name, epoch=self._epochs[name], model=model)
        self._write(f"samples/{name}_epoch_{self._epochs[name]}.json", sample)
        self._summaries.append(build_summary(sample))
        self._policies[policy] += 1
        for used, counts in sample["model_usage"].items():
            self._usage.setdefault(used, Counter()).update(counts)
        if result is not None:
            self._environments[result.env] += 1
            self._rewards += [result.reward] if result.reward is not None else []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if error is None:
                self._finish()
            self._zip.close()
            if error is None:
                self._part.replace(self._file)
        finally:
            self._part.unlink(missing_ok=True)

    def _finish(self) -> None:
        times = sorted(each[field] for each in self._summaries for field in ("started_at", "completed_at") if field in each)
        now = format_time(time.time_ns())
        spec, plan = self._build_spec(times[0] if times else now), {"name": "plan", "steps": [], "config": {}}
        self._write("_journal/start.json", {"version": LOG_VERSION, "eval": spec, "plan": plan})
        self._write("summaries.json", self._summaries)
        stats = {"started_at": times[0] if times else now, "completed_at": times[-1] if times else now}
        header = {
            "version": LOG_VERSION,
            "status": "success",
            "eval": spec,
            "plan": plan,
            "results": self._build_results(),
            "stats": {**stats, "model_usage": self._usage},
        }
        self._write("header.json", header)

    def _build_spec(self, created: str | None) -> dict[str, Any]:
        environments = [name for name, _ in self._environments.most_common() if name]
        epochs = set(self._epochs.values())
        policies = [name for name, _ in self._policies.most_common()]
        return {
            "eval_id": self._run,
            "run_id": self._run,
            "created": created,
            "task": self._run,
            "task_id": self._run,
            "task_version": 0,
            "task_attribs": {},
            "task_args": {},
            "dataset": {
                "name": ", ".join(environments[:3]) or self._run,
                "samples": len(self._epochs),
                "sample_ids": list(self._epochs),
                "shuffled": False,
            },
            "model": MODEL_PROVIDER + (policies[0] if policies else "default"),
            "model_generate_config": {},
            "model_args": {},
            "config": {"epochs": epochs.pop()} if len(epochs) == 1 else {},
            "packages": {"fleetbus": self._version},
            "scorers": [{"name": "reward", "metrics": [{"name": "mean"}, {"name": "stderr"}]}],
        }

    def _build_results(self) -> dict[str, Any]:
        count, total = len(self._rewards), len(self._summaries)
        mean = sum(self._rewards) / count if count else 0.0
        squares = sum((reward - mean) * (reward - mean) for reward in self._rewards)
        error = math.sqrt(squares / (count - 1) / count) if count > 1 else 0.0
        metrics = {name: {"name": name, "value": value, "params": {}} for name, value in (("mean", mean), ("stderr", error))}
        score = {
            "name": "reward", "scorer": "reward", "scored_samples": count, "unscored_samples": total - count, "params": {},
            "metrics": metrics,
        }  # fmt: skip
        return {"total_samples": total, "completed_samples": count, "scores": [score] if count else []}

    def _write(self, name: str, content: object) -> None:
        self._zip.writestr(name, msgspec.json.encode(content))


def build_name(key: str) -> str:
    """The name of a sample: a task's key, without what no name of a file can have."""
    name = "".join(letter if letter.isprintable() and letter not in "\\" else "_" for letter in key[:MAX_NAME])
    return "/".join(part if part.strip(".") else "_" for part in name.split("/"))  # none leads out of a folder
