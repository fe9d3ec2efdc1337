"""Boxes without Docker: an episode's folders on this machine's disk, played in the sandbox over this machine's own programs.

The folders outlive what runs in them, so that ending everything and grading in a fresh sandbox is one and the same. What needs
an image, another user or a network is refused by name.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from fleetbus.errors import UserError
from fleetbus_workers.environment.adapters.harbor.box import FOLDERS, CommandResult, Recipe, find_reason
from fleetbus_workers.environment.adapters.harbor.dockerfile import Build, read_dockerfile
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.failure_location import clean_error
from fleetbus_workers.environment.isolation.foreign_files import (
    TreeTooDeep,
    copy_tree,
    empty_folder,
    find_outside,
    give_tree,
    measure_tree,
    read_regular_file,
    remove_tree,
    sweep_folders,
)
from fleetbus_workers.environment.isolation.sandbox import Isolation, SandboxLimits, SandboxSession
from fleetbus_workers.environment.isolation.sandbox.memory import MemoryWatch
from fleetbus_workers.environment.isolation.sandbox.session import SandboxFailed, allocate_user
from fleetbus_workers.environment.ownership import build_process_owner

PREFIX = "fleetbus-harbor-"
STAGE = "/stage"
"""Where what is put into a folder of the policy's stands before it is copied by a process of the box itself."""

STORAGE_MB = 1024
STORAGE_SECONDS = 0.25
"""How often the files of a box are measured while a command runs."""

_SHELL = """
import subprocess as _s, sys as _y
_r = _s.run({command!r}, cwd={workdir!r}, env={variables!r}, stdin=_s.DEVNULL, start_new_session=True).returncode
_y.exit(_r if _r >= 0 else 128 - _r)
"""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class SandboxBoxes:
    """Makes boxes; use it inside `run`. ``limits`` hold where a task says nothing."""

    def __init__(self, isolation: Isolation, limits: SandboxLimits) -> None:
        self._isolation = isolation
        self._limits = limits
        self._watch = MemoryWatch()
        self._root = Path()
        self._boxes: set[SandboxBox] = set()
        self._images: dict[str, tuple[Build, Path]] = {}
        self._building = anyio.Lock()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        await anyio.to_thread.run_sync(sweep_folders, PREFIX)
        self._root = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{build_process_owner()}-"))
        os.chmod(self._root, 0o711)
        try:
            async with self._watch.run():
                yield
        finally:
            with anyio.CancelScope(shield=True):
                for box in tuple(self._boxes):
                    await box.stop()
                await anyio.to_thread.run_sync(remove_tree, self._root)

    def find_unsupported(self, recipe: Recipe, users: Sequence[str | int | None]) -> list[str]:
        found = []
        if recipe.place.network_mode != "no-network":
            found.append("network_mode must be 'no-network'")
        if recipe.place.docker_image:
            found.append(f"docker_image {recipe.place.docker_image} is an image")
        if others := sorted({str(user) for user in users if user not in (None, "root", 0)}):
            found.append(f"users ({', '.join(others)})")
        try:
            read_dockerfile(recipe.folder)
        except UserError as error:
            found.append(str(error))
        return found

    async def prepare(self, recipe: Recipe) -> None:
        if recipe.digest in self._images:
            return  # while another one is built
        async with self._building:
            if recipe.digest in self._images:
                return
            build = read_dockerfile(recipe.folder)
            image = self._root / f"image-{len(self._images)}"
            box = await self._make_box(image, build, recipe, _make_folders(image, build))
            try:
                await _carry_out(build, recipe, box)
                await box.end_processes()
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await box.stop()
                raise
            self._boxes.discard(box)
            self._images[recipe.digest] = (build, image)

    async def start(self, recipe: Recipe) -> SandboxBox:
        await self.prepare(recipe)
        build, image = self._images[recipe.digest]
        folder = Path(tempfile.mkdtemp(prefix="box-", dir=self._root))
        try:
            await anyio.to_thread.run_sync(lambda: shutil.copytree(image, folder, symlinks=True, dirs_exist_ok=True))
            box = await self._make_box(folder, build, recipe, _make_folders(folder, build))
            await box.open()
            return box
        except BaseException:
            with anyio.CancelScope(shield=True):
                for box in [each for each in self._boxes if each.folder == folder]:
                    await box.stop()
                await anyio.to_thread.run_sync(remove_tree, folder)
            raise

    async def _make_box(self, folder: Path, build: Build, recipe: Recipe, mounts: dict[str, Path]) -> SandboxBox:
        place = recipe.place
        memory = (place.memory_mb << 20) if place.memory_mb else self._limits.total_memory_bytes
        storage = (place.storage_mb or STORAGE_MB) << 20
        limits = msgspec.structs.replace(
            self._limits, total_memory_bytes=memory, memory_bytes=max(memory, self._limits.memory_bytes), file_bytes=storage
        )
        box = SandboxBox(self, folder, mounts, build, recipe, limits, storage)
        if os.geteuid() == 0:
            for outside in mounts.values():
                await anyio.to_thread.run_sync(give_tree, outside, box.user)
        self._boxes.add(box)
        return box

    def make_session(self, box: SandboxBox) -> SandboxSession:
        writable = {inside: str(outside) for inside, outside in box.mounts.items()}
        return SandboxSession(self._isolation, box.limits, self._watch, user=box.user, writable=writable)

    def forget(self, box: SandboxBox) -> None:
        self._boxes.discard(box)


class SandboxBox:
    """One episode's folders and the sandbox that is open on them; see `Box`."""

    def __init__(
        self,
        maker: SandboxBoxes,
        folder: Path,
        mounts: dict[str, Path],
        build: Build,
        recipe: Recipe,
        limits: SandboxLimits,
        storage_bytes: int,
    ) -> None:
        self._maker = maker
        self.folder = folder
        self.mounts = mounts
        self.limits = limits
        self.user = allocate_user()
        self._storage_bytes = self._tolerated_bytes = storage_bytes
        self._workdir = recipe.place.workdir or build.workdir
        self._variables = {"PATH": _PATH, "HOME": "/tmp", "LANG": "C.UTF-8", **build.variables, **recipe.variables}
        self._session: SandboxSession | None = None

    async def open(self) -> SandboxSession:
        """Start the sandbox on these folders, unless it is open; raises `EnvironmentFailed`."""
        if self._session is None:
            self._session = self._maker.make_session(self)
        try:
            await self._session.open()
        except SandboxFailed as error:
            raise EnvironmentFailed(str(error)) from error
        return self._session

    async def run(
        self, command: str, *, user: str | int | None, variables: Mapping[str, str], seconds: float, workdir: str | None = None
    ) -> CommandResult:
        session = await self.open()
        program = ["/bin/bash", "-c", command]
        merged = {**self._variables, **variables}
        code = _SHELL.format(command=program, workdir=workdir or self._workdir, variables=merged)
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch_storage, session)
            try:
                result = await session.run(code, seconds=seconds)
            except SandboxFailed as error:
                raise EnvironmentFailed(str(error)) from error
            finally:
                group.cancel_scope.cancel()
        used, reason = await anyio.to_thread.run_sync(self._find_excess)
        self._tolerate(used)
        if reason:
            await self.end_processes()
            return CommandResult(output=f"the disk is full: {reason}", exit_code=137, ended="exit")
        output = result.stdout + (f"\n[stderr]\n{result.stderr.rstrip()}" if result.stderr.strip() else "")
        return CommandResult(output=output, exit_code=result.exit_code, ended=result.ended or result.code_ended)

    async def _watch_storage(self, session: SandboxSession) -> None:
        """No limit of a process bounds how many files it writes."""
        while True:
            await anyio.sleep(STORAGE_SECONDS)
            used, reason = await anyio.to_thread.run_sync(self._find_excess)
            if reason and used > self._tolerated_bytes:
                session.end("exit")

    def _find_excess(self) -> tuple[float, str]:
        """Bytes of the files of the box, and their excess over the limit in words; empty if they keep it."""
        try:
            used = measure_tree(self.folder)
        except TreeTooDeep as error:
            return math.inf, str(error)
        return used, f"{used >> 20} MiB" if used > self._storage_bytes else ""

    def _tolerate(self, used: float) -> None:
        """Let the next commands have what one that was ended left, so that they can remove it, and never more than the first
        of them left."""
        if used <= self._storage_bytes:
            self._tolerated_bytes = self._storage_bytes
        elif self._tolerated_bytes == self._storage_bytes and used < math.inf:
            self._tolerated_bytes = int(used)

    async def put(self, source: Path, target: str) -> None:
        stage = self.mounts[STAGE]
        await self.end_processes()
        await anyio.to_thread.run_sync(copy_tree, source, stage)
        if os.geteuid() == 0:
            await anyio.to_thread.run_sync(give_tree, stage, self.user)
        quoted = shlex.quote(target)
        command = f"mkdir -p {quoted} && cp -a {STAGE}/. {quoted}/"
        copied = await self.run(command, user=None, variables={}, seconds=60, workdir="/")
        await self.end_processes()
        await anyio.to_thread.run_sync(empty_folder, stage)
        if copied.exit_code:
            raise EnvironmentFailed(f"files could not be put into {target}: {copied.output.strip()[-200:]}")

    async def clear(self, folder: str) -> None:
        await self.end_processes()
        outside = find_outside(self.mounts, folder)
        if outside is None or not outside.is_dir():
            raise EnvironmentFailed(f"{folder} is no folder any more")
        await anyio.to_thread.run_sync(empty_folder, outside)

    async def read(self, path: str, limit: int) -> bytes | None:
        await self.end_processes()
        outside = find_outside(self.mounts, path)
        return None if outside is None else await anyio.to_thread.run_sync(read_regular_file, outside, limit)

    async def export(self, paths: Sequence[str], target: Path) -> None:
        await self.end_processes()
        await anyio.to_thread.run_sync(self._export, paths, target)

    def _export(self, paths: Sequence[str], target: Path) -> None:
        for path in paths:
            outside, place = find_outside(self.mounts, path), target / path.lstrip("/")
            if outside is not None and outside.is_dir():
                with contextlib.suppress(TreeTooDeep):  # what lies deeper than paths reach is nobody's answer
                    copy_tree(outside, place)
            elif outside is not None and (content := read_regular_file(outside, self._storage_bytes)) is not None:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)

    async def end_processes(self) -> None:
        session, self._session = self._session, None
        if session is not None and not await session.close():
            raise EnvironmentFailed("the processes of the sandbox did not end")

    async def stop(self) -> None:
        session, self._session = self._session, None
        with anyio.CancelScope(shield=True):
            if session is not None:
                await session.close()
            self._maker.forget(self)
            await anyio.to_thread.run_sync(remove_tree, self.folder)


def _make_folders(folder: Path, build: Build) -> dict[str, Path]:
    """The folders of a box: where they are inside, and on this machine."""
    mounts = {}
    for inside in (*build.roots, *FOLDERS, STAGE):
        mounts[inside] = folder / inside.strip("/").replace("/", "-")
        mounts[inside].mkdir(parents=True, exist_ok=True)
    return mounts


async def _carry_out(build: Build, recipe: Recipe, box: SandboxBox) -> None:
    """Carry out what the Dockerfile says, in its order."""
    os.makedirs(box.mounts[build.roots[0]], exist_ok=True)
    await _expect(box, f"mkdir -p {shlex.quote(build.workdir)}", "/")
    for kind, what, where in build.actions:
        if kind == "run":
            await _expect(box, what, where, recipe.place.build_timeout_sec)
            continue
        source = recipe.folder / what
        if source.is_dir():
            await box.put(source, where.rstrip("/"))
        elif source.is_file():
            with tempfile.TemporaryDirectory(prefix=PREFIX) as single:
                name = source.name if where.endswith("/") else Path(where).name
                shutil.copy(source, Path(single, name))
                await box.put(Path(single), where.rstrip("/") if where.endswith("/") else str(Path(where).parent))
        else:
            raise EnvironmentFailed(f"{recipe.folder}/Dockerfile: COPY {what}: there is no such file")


async def _expect(box: SandboxBox, command: str, workdir: str, seconds: float = 60.0) -> None:
    done = await box.run(command, user=None, variables={}, seconds=seconds, workdir=workdir)
    if done.exit_code:
        raise EnvironmentFailed(f"RUN {clean_error(command)[:80]}: exit code {done.exit_code}: {find_reason(done.output)}")
