"""Plays episodes of another package in that package's own interpreter: ``fleetbus_runner.py KIND NAME [ARGUMENT=VALUE ...]``.

In its working folder are two named pipes. Lines of JSON come on ``requests``: ``{"id", "task", "base_url", "reward_url"}``
plays an episode, ``{"cancel": id}`` ends one. Lines leave on ``replies``: ``{"ready": true}`` once both are open, then per
episode ``{"id"}``, with ``error`` if the package failed; the reward is posted before that. ``--list COUNT`` before KIND prints
``{"tasks", "source"}`` instead, as one line of JSON: the tasks, and the package, version and digest that they are of, if it is
known. KIND is a module beside this file, ``fleetbus_KIND``, with `open_environment`.

Standard library alone, and nothing of fleetbus: it is not installed there.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import os
import random
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fleetbus_process import describe_error

SET_DUMPABLE = 4
POST_SECONDS = 60.0
EXIT_SECONDS = 5.0
ERROR_CHARACTERS = 2000


def main() -> None:
    """List tasks or play episodes until the other side is gone."""
    words = sys.argv[1:]
    count = int(words[1]) if words[0] == "--list" else 0
    kind, name, *arguments = words[2:] if count else words
    out = os.dup(1)
    os.dup2(2, 1)  # packages print; what is read here is only what is meant
    random.seed(0)  # packages that draw their tasks draw the same ones in every process
    if os.path.isdir(name):
        sys.path.insert(0, name)
        name = os.path.basename(name)
    module = importlib.import_module(f"fleetbus_{kind}")
    opened = module.open_environment(name, dict(map(read_argument, arguments)))
    if count:
        os.write(out, json.dumps(asyncio.run(list_tasks(opened, count))).encode() + b"\n")
    else:
        asyncio.run(Runner().serve(opened))
    os.close(out)


def read_argument(word: str) -> tuple[str, Any]:
    """``NAME=VALUE``, the value as JSON if it is some; null is a word: environments have parts of that name."""
    name, _, value = word.partition("=")
    try:
        return name, value if value == "null" else json.loads(value)
    except ValueError:
        return name, value


async def list_tasks(opened: Any, count: int) -> dict[str, Any]:
    async with opened as environment:
        return {"tasks": environment.list_tasks(count), "source": getattr(environment, "source", {})}


class Runner:
    """The episodes that are played now."""

    def __init__(self) -> None:
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._requests = self._replies = -1

    async def serve(self, opened: Any) -> None:
        """Play what is asked for, side by side; a package that cannot be loaded ends the process with its message."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)  # what runs here for the policy reads neither pipes nor keys
        self._requests = os.open("requests", os.O_RDONLY)
        self._replies = os.open("replies", os.O_WRONLY)
        self._reply({"ready": True})
        lines: asyncio.Queue[bytes] = asyncio.Queue()
        threading.Thread(target=self._read, args=(lines, asyncio.get_running_loop()), daemon=True).start()
        with exit_in_time():
            async with opened as environment:
                with exit_in_time():
                    while True:
                        self._obey(environment, json.loads(await lines.get()))

    def _read(self, lines: asyncio.Queue[bytes], loop: asyncio.AbstractEventLoop) -> None:
        with os.fdopen(self._requests, "rb") as file:
            for line in file:
                try:
                    loop.call_soon_threadsafe(lines.put_nowait, line)
                except RuntimeError:
                    return  # the loop is closed, and the main thread is saying why
        os._exit(0)  # the other side is gone

    def _obey(self, environment: Any, asked: dict[str, Any]) -> None:
        if "cancel" in asked:
            if (playing := self._playing.get(asked["cancel"])) is not None:
                playing.cancel()
            return
        self._playing[asked["id"]] = asyncio.create_task(self._play(environment, asked))

    async def _play(self, environment: Any, asked: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"id": asked["id"]}
        try:
            result = await environment.play(asked["task"], asked["base_url"])
            if asked["reward_url"]:
                await asyncio.to_thread(post, asked["reward_url"], result)
        except asyncio.CancelledError:
            answer["error"] = "cancelled"
        except BaseException as error:  # noqa: BLE001  # the package may fail in any way, and its other episodes go on
            answer["error"] = describe_error(error)[:ERROR_CHARACTERS]
        del self._playing[asked["id"]]
        self._reply(answer)

    def _reply(self, answer: dict[str, Any]) -> None:
        os.write(self._replies, json.dumps(answer).encode() + b"\n")


@contextmanager
def exit_in_time() -> Iterator[None]:
    """Behind it the process ends within `EXIT_SECONDS`. What a package raises in a task of its own, as SystemExit, may end the
    event loop: then Python waits for all threads, and who waits for episodes would wait as long."""
    try:
        yield
    finally:
        ending = threading.Timer(EXIT_SECONDS, os._exit, (1,))
        ending.daemon = True
        ending.start()


def post(url: str, body: dict[str, Any]) -> None:
    """Post the reward. Raises `OSError` if it is refused, as what is no number is."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=POST_SECONDS).close()


if __name__ == "__main__":
    main()
