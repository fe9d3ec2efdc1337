"""Replaces and withdraws the key of every role of a run that trains, while its workers are killed in turn.

    python benchmarks/replaced_keys.py --json

The deployment is that of `benchmarks.soak_deployed`: three nats-servers with routes, TLS and keys, and all roles as processes.
For each user of the run the key is replaced (`fleetbus auth rotate`) and the servers read their configuration again; what held
it ends and is started with the new one. Then, but for the admin's, it is withdrawn (`auth revoke`) and after that made anew
(`auth init`). Beside it an environment worker, the inference worker or the learner is killed with SIGKILL every
``--kill-every`` seconds, in turn; between two keys there are ``--pause`` seconds. ``seconds_until_refused`` is from the
servers' reload until the old key is refused by all of them; ``seconds_until_next_step`` from there. ``deaths`` are processes
that ended although neither a key nor a kill ended them, and those that held a key and did not end with it. Exits with 1 if
there is one, the audit does not balance, or the servers' logs name a violation of rights.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio
import anyio.lowlevel

from benchmarks.soak_deployed import ROLES, RUN, Deployment, build_parser, build_plan, deployed, run_in_folder
from fleetbus.auth.access import build_access
from fleetbus.auth.folder import AuthFolder, write_folder
from fleetbus.auth.rotation import KeyReplaced, revoke_key, rotate_key
from fleetbus.bus.nats import connect
from fleetbus.errors import BusClosed, UserError
from fleetbus_schemas.channels import ROLES as USERS
from tests.support.servers import RELOADS, RunningServers, _read_routes, _write_configs

KILLED = ("environment-0", "inference-0", "environment-1", "learner-0")
HOLDERS = {"monitor": ("top", "metrics", "monitor"), **{role: () for role in USERS if role != "monitor"}}
REFUSED_SECONDS = 30.0
END_SECONDS = 60.0
"""For what held a key to end, once the servers refuse that."""

LIMIT_SECONDS = 1500.0


class Replacement(Deployment):
    """`Deployment` with these chapters, and kills beside them."""

    def __init__(self, servers: RunningServers, folder: Path, kill_every: float, pause: float) -> None:
        super().__init__(servers, folder, minutes=0.0)
        self._kill_every, self._pause = kill_every, pause
        self._refused: dict[str, float] = {}
        self._kills = 0

    def list_chapters(self) -> dict[str, Callable[[], Awaitable[None]]]:
        chapters: dict[str, Callable[[], Awaitable[None]]] = {"start": anyio.lowlevel.checkpoint}
        for user in USERS:
            chapters[f"replaced: {user}"] = partial(self._change, f"replaced: {user}", user, rotate_key)
            if user != "admin":
                chapters[f"withdrawn: {user}"] = partial(self._change, f"withdrawn: {user}", user, revoke_key)
        return chapters

    async def run(self) -> dict[str, Any]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._kill_in_turn)
            report = await super().run()
            tasks.cancel_scope.cancel()
        return report | {"kills": self._kills, "seconds_until_refused": self._refused}

    async def _kill_in_turn(self) -> None:
        for name in itertools.cycle(KILLED):
            await anyio.sleep(self._kill_every)
            self._kills += self.places[name].kill()

    async def _change(self, chapter: str, user: str, change: Callable[[AuthFolder, str, str], KeyReplaced]) -> None:
        await anyio.sleep(self._pause)
        before = self._copy_keys(f"before {chapter}")
        with self._holding(user):
            changed = change(self.auth, RUN, user)
            await self._cut_off(chapter, user, before)
            if not changed.key:
                write_folder(self.auth, [build_plan()], hosts=["127.0.0.1"], days=1, routes=_read_routes(self.auth))
                for _ in range(RELOADS):
                    await self._reload()

    @contextmanager
    def _holding(self, user: str) -> Iterator[None]:
        """Nothing that holds this user's key is started within: the servers do not know the key that it would read."""
        holders = [self.places[name] for name in self._list_holders(user)]
        for holder in holders:
            holder.hold()
        yield
        for holder in holders:
            holder.release()

    async def _cut_off(self, chapter: str, user: str, before: AuthFolder) -> None:
        for name in self._list_holders(user):
            self.places[name].expect_end()
        await self._reload()
        began = anyio.current_time()
        for server in self.servers.processes:
            with anyio.fail_after(REFUSED_SECONDS):
                await self._wait_until_refused(server.url, user, before)
        self._refused[chapter] = round(anyio.current_time() - began, 2)
        async with anyio.create_task_group() as tasks:
            for name in self._list_holders(user):
                tasks.start_soon(self.places[name].wait_until_ended, END_SECONDS)

    async def _reload(self) -> None:
        _write_configs(self.auth, _read_routes(self.auth))
        await anyio.to_thread.run_sync(self.reload_servers)

    async def _wait_until_refused(self, url: str, user: str, before: AuthFolder) -> None:
        role = {"admin": "init", "operator": "cancel"}.get(user, user)
        while True:
            try:
                async with connect(url, run=RUN, role=role, worker=f"{user}-old", **build_access(role, str(before.path), RUN)):
                    await anyio.sleep(0.02)
            except UserError as error:
                if "refused the credentials" not in str(error):
                    raise
                return
            except (BusClosed, TimeoutError):  # it was let in just before the reload
                await anyio.sleep(0.02)

    def _list_holders(self, user: str) -> list[str]:
        named = HOLDERS[user] or [name for name in self.places if user in ROLES and name.startswith(user)]
        return list(named)

    def _copy_keys(self, name: str) -> AuthFolder:
        shutil.copytree(self.auth.path, self.folder / name)
        return AuthFolder(self.folder / name)


async def replace_all(folder: Path, kill_every: float, pause: float) -> dict[str, Any]:
    """The report."""
    with anyio.fail_after(LIMIT_SECONDS):
        async with deployed(folder) as servers:
            return await Replacement(servers, folder, kill_every, pause).run()


def main() -> int:
    parser = build_parser(__doc__)
    parser.add_argument("--kill-every", type=float, default=10.0, help="seconds from one kill to the next")
    parser.add_argument("--pause", type=float, default=10.0, help="seconds from one key to the next")
    options = parser.parse_args()
    return run_in_folder(partial(replace_all, kill_every=options.kill_every, pause=options.pause), options)


if __name__ == "__main__":
    sys.exit(main())
