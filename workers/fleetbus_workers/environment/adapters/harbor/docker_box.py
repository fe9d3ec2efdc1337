"""Boxes as containers of a Docker engine: built once per folder, removed with the episode.

Blocking calls of docker-py run in threads and are waited for when cancelled; every command has its time limit in the container.
"""

from __future__ import annotations

import io
import os
import shlex
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from fleetbus.concurrency.task_groups import open_first_error_task_group
from fleetbus.config.settings import Configuration
from fleetbus_workers.environment.adapters.harbor.box import FOLDERS, MAX_ARTIFACT_BYTES, CommandResult, Recipe, find_reason
from fleetbus_workers.environment.adapters.providers.base import generate_server_name
from fleetbus_workers.environment.adapters.providers.docker import DockerEngine
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.isolation.foreign_files import copy_tree
from fleetbus_workers.environment.ownership import Labels, build_process_owner

IMAGE = "fleetbus-harbor"
KILL_SECONDS = 5
OUTPUT_BYTES = 1 << 20
"""What is kept of a command's output; the rest is counted."""

BUILD_LOG_PARTS = 1000
"""So many of the last lines of a build that failed are looked through."""

TIME_UP, KILLED = (124, 137), 137
RIGHTS = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"]
"""What root of a container needs to install, to own files and to become other users; no raw network, no devices."""

MAX_PROCESSES = 512


async def find_engine() -> str:
    """The reason why no container can be started here; empty if one can."""
    import importlib.util

    if importlib.util.find_spec("docker") is None:
        return "docker-py is missing: pip install 'fleetbus[docker]'"
    engine = DockerEngine()
    try:
        await engine.call("answer", lambda client: client.ping())
    except EnvironmentFailed as error:
        return str(error)
    finally:
        await engine.close()
    return ""


class DockerBoxes:
    """Makes boxes; use it inside `run`."""

    def __init__(self, settings: Configuration) -> None:
        self._settings = settings
        self._engine = DockerEngine(seconds=settings.limits.episode)
        self._owner = build_process_owner()
        self._prepared: dict[str, str] = {}
        self._building = anyio.Lock()
        self._boxes: set[DockerBox] = set()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        await self._engine.sweep()
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                for box in tuple(self._boxes):
                    await box.stop()
                await self._engine.close()

    def find_unsupported(self, recipe: Recipe, users: Sequence[str | int | None]) -> list[str]:
        return []

    async def prepare(self, recipe: Recipe) -> None:
        if recipe.digest in self._prepared:
            return  # while another one is built
        async with self._building:
            if recipe.digest in self._prepared:
                return
            image = recipe.place.docker_image or f"{IMAGE}:{recipe.digest[:24]}"
            if not await self._engine.call("look for the image", lambda client: _has_image(client, image)):
                if recipe.place.docker_image:
                    await self._engine.call("pull the image", lambda client: client.images.pull(image))
                else:
                    await self._build(recipe, image)
            self._prepared[recipe.digest] = image

    async def _build(self, recipe: Recipe, image: str) -> None:
        """The engine ends a build whose client hangs up, as a cancelled worker does: it may not stay for the end."""
        build = _Build(recipe, image)

        async def hang_up_when_cancelled() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                build.hang_up()

        async with open_first_error_task_group() as group:
            group.start_soon(hang_up_when_cancelled)
            await self._engine.call("build the image", build.run)
            await anyio.lowlevel.checkpoint_if_cancelled()  # it was not built then
            group.cancel_scope.cancel()

    async def start(self, recipe: Recipe) -> DockerBox:
        await self.prepare(recipe)
        name, place, container = generate_server_name(), recipe.place, self._settings.container
        memory = (place.memory_mb << 20) if place.memory_mb else container.memory_bytes
        expires = int(self._settings.limits.episode) + 600
        options = {
            "name": name,
            "command": ["sh", "-c", "while :; do sleep 3600; done"],
            "environment": dict(recipe.variables),
            "labels": _label(self._settings.run.name, self._owner, expires),
            "detach": True,
            "init": True,
            "network_mode": "none" if place.network_mode == "no-network" else "bridge",
            "mem_limit": memory,
            "memswap_limit": memory,
            "nano_cpus": int((place.cpus or container.cpus) * 1e9),
            "pids_limit": MAX_PROCESSES,
            "cap_drop": ["ALL"],
            "cap_add": RIGHTS,
            "security_opt": ["no-new-privileges"],
        }
        image = self._prepared[recipe.digest]
        box = DockerBox(self._engine, name, place.workdir, self._boxes.discard)
        self._boxes.add(box)
        try:
            await self._engine.call("start", lambda client: client.containers.run(image, **options))
            made = await box.run(
                f"mkdir -p {' '.join(FOLDERS)} && chmod 777 {' '.join(FOLDERS)}", user=0, variables={}, seconds=30
            )
            if made.exit_code:
                raise EnvironmentFailed(f"the container does not run commands: {made.output.strip()[-200:]}")
        except BaseException:
            await box.stop()
            raise
        return box


class DockerBox:
    """One container; see `Box`."""

    def __init__(self, engine: DockerEngine, name: str, workdir: str | None, forget: Any) -> None:
        self._engine = engine
        self._name = name
        self._workdir = workdir
        self._forget = forget

    async def run(
        self, command: str, *, user: str | int | None, variables: Mapping[str, str], seconds: float, workdir: str | None = None
    ) -> CommandResult:
        limited = ["timeout", "-k", str(KILL_SECONDS), f"{max(seconds, 0.1):.1f}", "bash", "-c", command]
        began = anyio.current_time()
        output, code = await self._engine.call(
            "run a command",
            lambda client: _execute(
                client, self._name, limited, "" if user is None else str(user), dict(variables), workdir or self._workdir
            ),
        )
        late = code in TIME_UP and anyio.current_time() - began >= seconds
        return CommandResult(output=output, exit_code=code, ended="time" if late else "")

    async def put(self, source: Path, target: str) -> None:
        content = await anyio.to_thread.run_sync(_pack, source)
        await self._as_root(f"mkdir -p {shlex.quote(target)}")
        await self._engine.call("copy files", lambda client: client.containers.get(self._name).put_archive(target, content))

    async def clear(self, folder: str) -> None:
        path = shlex.quote(folder)
        await self._as_root(f"rm -rf {path} && mkdir -p {path} && chmod 777 {path}")

    async def read(self, path: str, limit: int) -> bytes | None:
        content: bytes | None = await self._engine.call("read a file", lambda client: _read(client, self._name, path, limit))
        return content

    async def export(self, paths: Sequence[str], target: Path) -> None:
        for path in paths:
            await self._engine.call("read artifacts", partial(_export, name=self._name, path=path, target=target))

    async def end_processes(self) -> None:
        await self._engine.call("end processes", lambda client: client.containers.get(self._name).restart(timeout=0))

    async def stop(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._engine.remove(self._name)
            self._forget(self)

    async def _as_root(self, command: str) -> None:
        done = await self.run(command, user=0, variables={}, seconds=60, workdir="/")
        if done.exit_code:
            raise EnvironmentFailed(f"{command[:60]}: {done.output.strip()[-200:]}")


def _label(run: str, owner: str, seconds: int) -> dict[str, str]:
    return Labels(run=run, episode="", owner=owner, expires=int(time.time()) + seconds).to_mapping()


def _has_image(client: Any, image: str) -> bool:
    import docker

    try:
        client.images.get(image)
    except docker.errors.ImageNotFound:
        return False
    return True


class _Build:
    """One build: `run` in a thread, `hang_up` in the event loop."""

    def __init__(self, recipe: Recipe, image: str) -> None:
        self._recipe = recipe
        self._image = image
        self._answers: list[Any] = []
        self._has_hung_up = False

    def run(self, _client: Any) -> None:
        import docker
        import requests
        import urllib3

        seconds = int(self._recipe.place.build_timeout_sec)
        with closing(docker.from_env(timeout=seconds)) as own:
            own.api.hooks["response"].append(self._note_answer)
            folder = str(self._recipe.folder)
            try:
                own.images.build(path=folder, tag=self._image, rm=True, forcerm=True, timeout=seconds, pull=False)
            except docker.errors.BuildError as error:
                said = "".join(str(part.get("stream", "")) for part in deque(error.build_log, BUILD_LOG_PARTS))
                raise EnvironmentFailed(f"the image was not built: {error.msg}: {find_reason(said)}") from error
            except (urllib3.exceptions.HTTPError, requests.RequestException) as error:
                if not self._has_hung_up:
                    raise requests.ConnectionError(str(error)) from error

    def _note_answer(self, answer: Any, **_: object) -> None:
        self._answers.append(answer)
        if self._has_hung_up:
            self.hang_up()

    def hang_up(self) -> None:
        from docker.types import CancellableStream

        self._has_hung_up = True
        while self._answers:
            with suppress(AttributeError, OSError):  # it was read to its end
                CancellableStream(None, self._answers.pop()).close()


def _execute(
    client: Any, name: str, command: list[str], user: str, variables: dict[str, str], workdir: str | None
) -> tuple[str, int]:
    """Output, its beginning at most, and exit code."""
    from docker.utils.socket import frames_iter

    made = client.api.exec_create(name, command, user=user, environment=variables, workdir=workdir)
    pieces, size = list[bytes](), 0
    stream = client.api.exec_start(made["Id"], socket=True)
    try:
        for _, piece in frames_iter(stream, tty=False):
            size += len(piece)
            if size <= OUTPUT_BYTES:
                pieces.append(piece)
    finally:
        getattr(stream, "_sock", stream).close()  # the stream's own `close` leaves its socket to the garbage collector
        stream.close()
    code = client.api.exec_inspect(made["Id"])["ExitCode"]
    more = f"\n[... {size - OUTPUT_BYTES} bytes cut ...]" if size > OUTPUT_BYTES else ""
    return b"".join(pieces).decode("utf-8", "replace") + more, KILLED if code is None else code


def _pack(source: Path) -> bytes:
    """A folder as an archive: its folders and regular files, all of root, scripts executable."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for parent, folders, files in os.walk(source):
            for entry in (*folders, *files):
                path = Path(parent, entry)
                if path.is_symlink():
                    continue
                info = archive.gettarinfo(str(path), str(path.relative_to(source)))
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                info.mode |= 0o755 if info.isdir() or path.suffix == ".sh" else 0o644
                with path.open("rb") if info.isreg() else io.BytesIO() as content:
                    archive.addfile(info, content if info.isreg() else None)
    return buffer.getvalue()


def _get_archive(client: Any, name: str, path: str, limit: int, *, cut: bool = False) -> tarfile.TarFile | None:
    """An archive of a path, None if nothing is there; of more than ``limit`` bytes the beginning, or `EnvironmentFailed`."""
    import docker

    try:
        chunks, _ = client.containers.get(name).get_archive(path)
    except docker.errors.NotFound:
        return None
    buffer = io.BytesIO()
    for chunk in chunks:
        if buffer.tell() + len(chunk) > limit and not cut:
            raise EnvironmentFailed(f"{path} is larger than {limit >> 20} MiB")
        buffer.write(chunk)
        if buffer.tell() > limit:
            break
    buffer.seek(0)
    return tarfile.open(fileobj=buffer)


def _read(client: Any, name: str, path: str, limit: int) -> bytes | None:
    archive = _get_archive(client, name, path, limit + (1 << 20), cut=True)
    if archive is None:
        return None
    with archive:
        member = archive.next()
        file = archive.extractfile(member) if member is not None and member.isreg() else None
        return file.read(limit + 1) if file is not None else None


def _export(client: Any, name: str, path: str, target: Path) -> None:
    archive = _get_archive(client, name, path, MAX_ARTIFACT_BYTES)
    if archive is None:
        return
    with archive, tempfile.TemporaryDirectory() as folder:
        kept = [member for member in archive.getmembers() if member.isreg() or member.isdir()]
        archive.extractall(folder, members=kept, filter="data")
        place = target / path.strip("/")
        found = Path(folder, place.name)
        if found.is_dir():
            copy_tree(found, place)
        elif found.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(found.read_bytes())
