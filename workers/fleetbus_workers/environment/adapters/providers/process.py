"""Servers as processes of this machine: a command with ``{port}`` in it, as in ``uvicorn my.module:app --port {port}``."""

import os
import shlex
import shutil
import socket
from collections.abc import Collection, Mapping

import anyio
import anyio.to_thread

from fleetbus.errors import UserError
from fleetbus_workers.environment.adapters.common.process_group import ProcessGroup
from fleetbus_workers.environment.adapters.providers.base import ProvidedServer, generate_server_name
from fleetbus_workers.environment.ownership import Labels, build_label_variables, sweep_abandoned_processes

PASSED = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP"),
        *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DISPLAY"),
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NO_PROXY", "no_proxy", "SYSTEMROOT", "COMSPEC", "PATHEXT"),
    )
)
"""Variables of the worker that every command gets; further ones if `environment.pass_variables` lists them."""

PASSED_PREFIXES = ("LC_", "XDG_", "OMP_", "MKL_", "PYTHONUNBUFFERED", "PYTHONUTF8")


def select_variables(variables: Mapping[str, str], listed: Collection[str]) -> dict[str, str]:
    """The variables that a command may see: an allow-list, because no list knows all names of secrets."""
    allowed = {*PASSED, *listed}
    return {key: value for key, value in variables.items() if key in allowed or key.startswith(PASSED_PREFIXES)}


class ProcessProvider:
    """Runs ``command`` on a free port of this machine's loopback, once per episode."""

    def __init__(self, command: str, *, passed: Collection[str] = ()) -> None:
        self._passed = passed
        try:
            self._command = shlex.split(command)
        except ValueError as error:
            raise UserError(f"the command cannot be read: {error}: {command}") from error
        if "{port}" not in command:
            raise UserError(f"the command must contain {{port}}, as in uvicorn module:app --port {{port}}: {command}")
        if shutil.which(self._command[0]) is None:
            raise UserError(f"command {self._command[0]!r} not found; install it or give its path")
        self._running: dict[str, ProcessGroup] = {}

    async def start(self, labels: Labels) -> ProvidedServer:
        port, name = _find_free_port(), generate_server_name()
        variables = select_variables(os.environ, self._passed) | build_label_variables(labels)
        command = [part.replace("{port}", str(port)) for part in self._command]
        self._running[name] = await ProcessGroup.start(command, called="the command", variables=variables)
        return ProvidedServer(name=name, url=f"http://127.0.0.1:{port}")

    async def find_problem(self, server: ProvidedServer) -> str:
        process = self._running[server.name]
        return "" if process.status is None else f"exit code {process.status}{process.read_last_line()}"

    async def stop(self, server: ProvidedServer) -> None:
        process = self._running.pop(server.name, None)
        if process is not None:
            await process.stop()

    async def sweep(self) -> list[str]:
        """Kill commands whose worker is gone. Only where /proc shows the variables of processes."""
        return await anyio.to_thread.run_sync(sweep_abandoned_processes)

    async def close(self) -> None:
        """Stop all that was not stopped."""
        for name in tuple(self._running):
            await self.stop(ProvidedServer(name=name, url=""))


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
