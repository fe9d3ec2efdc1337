"""Logs: what is bound stands in every line, secrets in none, and JSON stays one object per line."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from fleetbus.config.settings import LogSettings
from fleetbus.core.episode.trace_ids import build_call_path, build_turn_path, compute_session_trace_id, span_id, trace_id
from fleetbus.logs.setup import configure_logs, redact_event
from fleetbus.logs.trace_context import name_episode
from fleetbus.logs.uncaught import describe, log_uncaught
from fleetbus_schemas import EpisodeRequested, Task

SEED = "S" + "UAB" * 19


def json_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def json_stream(**values: Any) -> io.StringIO:
    stream = io.StringIO()
    configure_logs(LogSettings(format="json"), stream=stream, **values)
    return stream


def build_request(episode_id: str, *, deadline_ns: int) -> EpisodeRequested:
    return EpisodeRequested(
        episode_id=episode_id,
        group_id="g",
        sample_index=0,
        split="train",
        task=Task(key="k"),
        policy="p",
        deadline_ns=deadline_ns,
    )


def test_json_lines_carry_what_is_bound() -> None:
    stream = json_stream(run="r", role="environment", worker="environment-0")
    with structlog.contextvars.bound_contextvars(episode="e1", attempt=2, turn=3):
        structlog.get_logger().info("stepped", seconds=0.5)
    structlog.get_logger().info("idle")
    first, second = json_lines(stream)
    assert first["event"] == "stepped" and first["level"] == "info" and first["seconds"] == 0.5
    assert {key: first[key] for key in ("run", "role", "worker", "episode", "attempt", "turn")} == {
        "run": "r", "role": "environment", "worker": "environment-0", "episode": "e1", "attempt": 2, "turn": 3,
    }  # fmt: skip
    assert second["worker"] == "environment-0" and "episode" not in second


async def test_what_one_task_binds_does_not_show_in_another() -> None:
    stream = json_stream()

    async def session(episode: str, mine: anyio.Event, theirs: anyio.Event) -> None:
        with structlog.contextvars.bound_contextvars(episode=episode):
            mine.set()
            await theirs.wait()
            structlog.get_logger().info("stepped", of=episode)

    first, second = anyio.Event(), anyio.Event()
    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session, "a", first, second)
            tasks.start_soon(session, "b", second, first)
    lines = json_lines(stream)
    assert sorted(line["of"] for line in lines) == ["a", "b"]
    assert all(line["episode"] == line["of"] for line in lines)


@pytest.mark.parametrize("name", ["api_key", "API-Key", "authorization", "password", "token", "access_token", "nkey_seed"])
def test_values_of_secret_keys_are_redacted_at_any_depth(name: str) -> None:
    event = {"event": "x", "headers": [{name: "hunter2"}], name: "hunter2"}
    assert "hunter2" not in repr(redact_event(None, "info", event))


def test_numbers_that_sound_secret_stay() -> None:
    event = {"event": "x", "seed": 7, "tokens": 12, "max_tokens": "64"}
    assert redact_event(None, "info", event) == event


def test_credentials_in_urls_and_nkey_seeds_in_texts_are_redacted() -> None:
    stream = json_stream()
    structlog.get_logger().warning("connecting", url="nats://ada:hunter2@host:4222", detail=f"with {SEED}\nthen")
    text = stream.getvalue()
    assert "hunter2" not in text and SEED not in text and "host:4222" in text


@pytest.mark.parametrize("format", ["console", "json"])
def test_tracebacks_are_logged_without_secrets_and_without_locals(format: Any) -> None:
    stream = io.StringIO()
    configure_logs(LogSettings(format=format), stream=stream)
    local_value = "in-a-local-" + "variable"
    try:
        raise ValueError("cannot reach nats://ada:hunter2@host")
    except ValueError:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            structlog.get_logger().exception("crashed")
    text = stream.getvalue()
    assert "ValueError" in text and "nats://host" in text
    assert "hunter2" not in text and local_value not in text


def test_no_colours_unless_a_terminal_reads() -> None:
    stream = io.StringIO()
    configure_logs(LogSettings(), stream=stream, worker="w")
    structlog.get_logger().error("broken")
    assert "broken" in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_the_level_filters() -> None:
    stream = io.StringIO()
    configure_logs(LogSettings(level="warning", format="json"), stream=stream)
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")
    assert [line["event"] for line in json_lines(stream)] == ["loud"]


def test_libraries_log_in_the_same_format() -> None:
    stream = json_stream(worker="w")
    logging.getLogger("some.library").warning("slow %s", "nats://a:b@host")
    (line,) = json_lines(stream)
    assert (line["event"], line["level"], line["logger"], line["worker"]) == (
        "slow nats://host",
        "warning",
        "some.library",
        "w",
    )


@pytest.mark.integration
def test_records_of_threads_do_not_tear_each_other(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", buffering=1) as stream:
        configure_logs(LogSettings(format="json"), stream=stream)

        def write_own() -> None:
            for _ in range(200):
                structlog.get_logger().error("own", reason="x" * 20_000)  # more than a stream's buffer, as of a traceback

        def write_librarys() -> None:
            for number in range(1000):
                logging.getLogger("library").warning("%d %s", number, "y" * 300)

        threads = [threading.Thread(target=write) for write in (write_own, write_librarys) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 2400 and all(json.loads(line) for line in lines)


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise KeyError("no words")


def test_an_error_without_words_or_whose_words_cannot_be_had_is_named() -> None:
    assert describe(ValueError()) == "ValueError"
    assert describe(ExceptionGroup("tasks", [UnreadableError()])) == "UnreadableError: (its text cannot be had: KeyError)"


def test_records_of_an_episode_have_the_ids_of_its_trace() -> None:
    stream, request = json_stream(run="r", worker="w"), build_request("e1", deadline_ns=77)
    log = structlog.get_logger()
    with structlog.contextvars.bound_contextvars(**name_episode(request)):
        log.info("requested")
        with structlog.contextvars.bound_contextvars(attempt=2):
            log.info("claimed")
            log.info("answered", turn=3)
            logging.getLogger("some.library").warning("slow")
    log.info("idle")
    trace = trace_id("r", "e1", 77)
    paths = ["episode", "attempt/2", build_turn_path(2, 3), "attempt/2"]
    *lines, idle = json_lines(stream)
    assert [(line["trace_id"], line["span_id"]) for line in lines] == [
        (f"{trace:032x}", f"{span_id(trace, path):016x}") for path in paths
    ]
    assert "trace_id" not in idle and not any("deadline_ns" in line for line in lines)


def test_records_of_a_session_have_the_ids_of_its_trace() -> None:
    stream = json_stream(run="r")
    structlog.get_logger().info("called", session="s", call_key="7")
    structlog.get_logger().info("closed", session="s")
    trace = compute_session_trace_id("r", "s")
    called, closed = json_lines(stream)
    assert (called["trace_id"], called["span_id"]) == (f"{trace:032x}", f"{span_id(trace, build_call_path('7')):016x}")
    assert (closed["trace_id"], closed["span_id"]) == (f"{trace:032x}", f"{span_id(trace):016x}")


@pytest.mark.parametrize("known", [{"episode": "e1"}, {"episode": "e1", "deadline_ns": None}, {"episode": "e1", "session": 3}])
def test_an_episode_whose_deadline_is_not_known_gets_no_ids(known: dict[str, Any]) -> None:
    stream = json_stream(run="r")
    structlog.get_logger().info("excluded", **known)
    (line,) = json_lines(stream)
    assert "trace_id" not in line and "deadline_ns" not in line


def test_lines_for_people_have_neither_ids_nor_what_they_are_made_of() -> None:
    stream = io.StringIO()
    configure_logs(LogSettings(), stream=stream, run="r")
    structlog.get_logger().info("claimed", **name_episode(build_request("e1", deadline_ns=77)), call_key="7")
    assert "e1" in stream.getvalue()
    assert not any(word in stream.getvalue() for word in ("trace_id", "deadline_ns", "call_key"))


def test_what_the_interpreter_would_print_is_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((threading, "excepthook"), (sys, "unraisablehook")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    stream = json_stream(worker="w")

    def fail() -> None:
        raise ValueError("in\na thread")

    class Fails:
        def __del__(self) -> None:
            raise KeyError("while it is freed")

    log_uncaught()
    try:
        thread = threading.Thread(target=fail, name="reads")
        thread.start()
        thread.join()
        Fails()
        warnings.showwarning("odd", UserWarning, "file.py", 1)
    finally:
        logging.captureWarnings(False)
    of_thread, unraisable, warned = json_lines(stream)
    assert (of_thread["event"], of_thread["thread"], of_thread["reason"]) == (
        "thread crashed",
        "reads",
        "ValueError: in a thread",
    )
    assert of_thread["exception"][0]["exc_type"] == "ValueError"
    assert unraisable["reason"].startswith("KeyError") and unraisable["worker"] == "w"
    assert "odd" in warned["event"]
