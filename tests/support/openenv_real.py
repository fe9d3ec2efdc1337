"""A server of the real `openenv` package, for its own Python: ``python openenv_real.py echo|tools SESSIONS IDLE_SECONDS PORT``.

0 seconds: idle sessions are kept; port 0: any. Prints the port it listens on. Not a part of fleetbus: `openenv` needs an older
`mcp`, so it lives in an environment of its own.
"""

import os
import socket
import sys
import threading
import time

os.environ.setdefault("ENABLE_WEB_INTERFACE", "false")


def end_with_parent() -> None:
    """Standard input ends when whoever started this is gone."""
    sys.stdin.buffer.read()
    os._exit(0)


def make_app(world: str, sessions: int, idle_seconds: float | None):  # type: ignore[no-untyped-def]
    from fastmcp import FastMCP
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    from openenv.core.env_server.types import Action, ConcurrencyConfig, Observation, State
    from pydantic import field_validator

    class EchoAction(Action):
        message: str
        sleep_s: float = 0.0

        @field_validator("message")
        @classmethod
        def allowed(cls, value: str) -> str:
            if value == "forbidden":
                raise ValueError("a forbidden word")
            return value

    class EchoObservation(Observation):
        echoed: str = ""

    class EchoEnvironment(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._state = State(episode_id="none", step_count=0)
            self._closed = False

        def reset(self, seed=None, episode_id=None, **_):
            self._state = State(episode_id=episode_id or "fresh", step_count=0, seed=seed)
            return EchoObservation(echoed="ready")

        def step(self, action, timeout_s=None, **_):
            if action.message == "boom":
                raise RuntimeError("boom!")
            if action.message == "sleep":
                time.sleep(3)
            self._state.step_count += 1
            reward = float("nan") if action.message == "nan" else 0.5
            shown = f"{action.message}{' (closed)' if self._closed else ''}"
            return EchoObservation(echoed=shown, reward=reward, done=action.message == "stop")

        @property
        def state(self):
            return self._state

        def close(self):
            self._closed = True

    class ToolEnvironment(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            server = FastMCP("sums")

            @server.tool
            def add(a: int, b: int) -> int:
                """Add two numbers."""
                return a + b

            @server.tool
            def fail() -> str:
                """Fail."""
                raise RuntimeError("tool exploded")

            super().__init__(server)
            self._state = State(episode_id="none", step_count=0)

        def reset(self, seed=None, episode_id=None, **_):
            self._state = State(episode_id="fresh", step_count=0)
            return Observation()

        def _step_impl(self, action, timeout_s=None, **_):
            raise NotImplementedError

        def _graded(self, observation):
            self._state.step_count += 1
            if isinstance(observation, CallToolObservation) and getattr(observation.result, "data", None) == 5:
                observation.reward, observation.done = 1.0, True
            return observation

        def step(self, action, timeout_s=None, **options):
            return self._graded(super().step(action, timeout_s=timeout_s, **options))

        async def step_async(self, action, timeout_s=None, **options):
            return self._graded(await super().step_async(action, timeout_s=timeout_s, **options))

        @property
        def state(self):
            return self._state

    limits = ConcurrencyConfig(max_concurrent_envs=sessions, session_timeout=idle_seconds)
    if world == "echo":
        return create_fastapi_app(EchoEnvironment, EchoAction, EchoObservation, concurrency_config=limits)
    return create_fastapi_app(ToolEnvironment, CallToolAction, CallToolObservation, concurrency_config=limits)


def main() -> None:
    import uvicorn

    world, sessions, idle_seconds, port = sys.argv[1:]
    app = make_app(world, int(sessions), float(idle_seconds) or None)
    listener = socket.create_server(("127.0.0.1", int(port)))
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=end_with_parent, daemon=True).start()
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
