"""Foreign files as episodes: which format a file has is read from it, and what a folder holds is found. Blocking."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.errors import UserError
from fleetbus.interchange.atif_import import read_trajectory
from fleetbus.interchange.episode_facts import KEY, read_number, read_text
from fleetbus.interchange.eval_file import iterate_samples
from fleetbus.interchange.eval_import import read_sample
from fleetbus.interchange.imported import ImportedEpisode
from fleetbus_schemas.message import UNREADABLE

MAX_LINE_BYTES = 256 << 20
ZIP = b"PK"

TRIAL = ("..", "result.json")
"""Where a trial of Harbor has its verdict, from its ``agent/trajectory.json``."""


def iterate_episodes(path: Path, *, score: str = "") -> Iterator[ImportedEpisode]:
    """The episodes of a file, or of all trajectories in a folder. Raises `UserError` for what holds none."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*.json") if file.name == "trajectory.json" or file.parent == path)
        files += sorted(path.glob("*.jsonl"))
        files = [file for file in files if file.is_file()]  # a pipe would be waited for
        if not files:
            raise UserError(f"{path} has no trajectories: it should hold FILE.json, or Harbor's trials")
        for file in files:
            yield from _iterate_file(file, score)
        return
    yield from _iterate_file(path, score)


def _iterate_file(path: Path, score: str) -> Iterator[ImportedEpisode]:
    try:
        with path.open("rb") as file:
            start = file.read(len(ZIP))
            if start == ZIP:
                yield from (read_sample(sample, place, score=score) for sample, place in iterate_samples(path))
            elif path.suffix == ".jsonl":
                file.seek(0)
                yield from _iterate_lines(file, path)
            else:
                file.seek(0)
                episode = read_trajectory(_read_bounded(file.read(MAX_LINE_BYTES + 1), path), str(path))
                yield _add_verdict(episode, path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _iterate_lines(file: Any, path: Path) -> Iterator[ImportedEpisode]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if line.strip():
            yield read_trajectory(_read_bounded(line, path), f"{path}, line {number}")


def _read_bounded(data: bytes, path: Path) -> bytes:
    if len(data) > MAX_LINE_BYTES:
        raise UserError(f"{path} has a trajectory larger than {MAX_LINE_BYTES >> 20} MiB")
    return data


def _add_verdict(episode: ImportedEpisode, path: Path) -> ImportedEpisode:
    """Note what Harbor's trial around a trajectory says of it: its task and its reward."""
    file = path.parent.joinpath(*TRIAL)
    if KEY in episode.facts or path.name != "trajectory.json" or not file.is_file():
        return episode
    try:
        with file.open("rb") as opened:
            trial = msgspec.json.decode(opened.read(MAX_LINE_BYTES), type=dict[str, Any])
    except UNREADABLE as error:
        raise UserError(f"{file} is no result of a trial: {error}") from error
    verdict = trial.get("verifier_result")
    rewards = verdict.get("rewards") if isinstance(verdict, dict) else None
    rewards = rewards if isinstance(rewards, dict) else {}
    reward = read_number(rewards.get("reward", next(iter(rewards.values()), None)))
    known = {"task": read_text(trial.get("task_name")), "env": read_text(trial.get("source")), "reward": reward}
    episode.facts = {name: value for name, value in known.items() if value not in (None, "")} | episode.facts
    episode.name = read_text(trial.get("trial_name")) or episode.name
    return episode
