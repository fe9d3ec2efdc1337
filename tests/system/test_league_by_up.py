"""One command plays a league: the opponents' worker and the learner are killed, and the books balance all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from fleetbus.log.episodes import decode_entries
from fleetbus.recording import load_recording
from fleetbus_schemas import Action, EpisodeRequested, Observation, StepTrained

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "kuhn.py"
PLAYED = ("--config", str(EXAMPLE.with_suffix(".toml")), "--environment", f"{EXAMPLE}:Kuhn")
LEAGUE = ("--tasks", str(EXAMPLE.with_suffix(".json")), "--seat", "second=league:uniform:3")
SMALL = ("--steps", "4", "--learner-group-size", "4", "--learner-checkpoint-every", "1", "--no-monitor")
COMMAND = (sys.executable, "-m", "fleetbus_workers.cli")
VARIABLES = {key: value for key, value in os.environ.items() if not key.startswith("FLEETBUS_")}


def call(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=folder, env=VARIABLES, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def kill(supervisor: int, *words: str) -> None:
    """Kill the one process below it whose command has all ``words``."""
    (found,) = (each for each in psutil.Process(supervisor).children() if set(words) <= set(each.cmdline()))
    found.send_signal(signal.SIGKILL)


def test_a_league_survives_the_death_of_its_worker_and_of_the_learner(tmp_path: Path) -> None:
    started = [*COMMAND, "up", *PLAYED, *LEAGUE, *SMALL]
    with subprocess.Popen(
        started, cwd=tmp_path, env=VARIABLES, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as up:
        assert up.stdout is not None
        shown, is_learner_killed = "", False
        for line in up.stdout:
            shown += line
            if line.startswith("step 1/4"):
                kill(up.pid, "inference", "--inference-versions-of")
            elif line.startswith("step 2/4") and not is_learner_killed:
                is_learner_killed = True
                kill(up.pid, "learner")
    assert up.returncode == 0 and "finished" in shown, shown
    assert "inference-second-1 is ready" in shown and "learner-1 is ready" in shown, shown
    assert "the audit balances" in call(tmp_path, "audit", "kuhn", "--deep")
    call(tmp_path, "record", "kuhn", "--output", "kuhn.fbrec")
    entries = load_recording(tmp_path / "kuhn.fbrec").entries
    opponents: defaultdict[str, set[int | None]] = defaultdict(set)
    requested: dict[str, int | None] = {}
    for _, request in decode_entries(EpisodeRequested, [each for each in entries if ".task." in each.subject]):
        (seat,) = request.seats
        requested[request.episode_id] = seat.version
        opponents[request.group_id].add(seat.version)
    assert all(len(versions) == 1 for versions in opponents.values()), "drawn once for a group, by whichever learner"
    assert len(set.union(*opponents.values())) > 1
    shown_to = decode_entries(Observation, [each for each in entries if ".obs." in each.subject])
    seats = {(each.episode_id, each.attempt, each.turn): each.seat for _, each in shown_to}
    for _, action in decode_entries(Action, [each for each in entries if ".act." in each.subject]):
        if seats[action.episode_id, action.attempt, action.turn] == "second":
            assert {span.version for span in action.versions} == {requested[action.episode_id]}
    journal = [each for each in entries if ".train." in each.subject and b"StepTrained" in each.payload]
    newest = decode_entries(StepTrained, journal)[-1][1]
    assert newest.step == 4 and {"league_rating", "league_rating_error", "league_win_rate"} <= newest.metrics.keys()
    assert "replays as recorded" in call(tmp_path, "replay", "kuhn.fbrec", "--role", "learner")
