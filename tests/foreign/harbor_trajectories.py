"""Reads trajectories with harbor's own model, in an interpreter that has harbor: ``python harbor_trajectories.py FILE.jsonl``.

Prints one JSON line per answer that is no copied context: episode, turn, prompt ids, sampled ids, log-probabilities.
"""

import json
import sys
from pathlib import Path

from harbor.models.trajectories import Trajectory


def print_answers(trajectory: Trajectory, episode: str) -> None:
    for step in trajectory.steps:
        if step.source != "agent" or step.is_copied_context:
            continue
        metrics = step.metrics
        row = [episode, step.extra["turn"], metrics.prompt_token_ids, metrics.completion_token_ids, metrics.logprobs]
        print(json.dumps(row))
    for inner in trajectory.subagent_trajectories or ():
        print_answers(inner, episode)


for line in Path(sys.argv[1]).read_bytes().splitlines():
    read = Trajectory.model_validate_json(line)
    print(json.dumps([read.trajectory_id, len(read.steps), (read.extra or {}).get("reward")]))
    print_answers(read, read.trajectory_id)
