"""A platform that speaks Fleet's HTTP API on loopback: control plane, instances with managers and MCP servers, verifiers.

Routes, fields and answers are those that fleet-python 0.2.133 sends and expects; `tests/system/test_fleet_sdk.py` drives this
platform with that very client. Verifiers are really executed, in the project's sandbox. ``Faults`` says what goes wrong.
"""

from __future__ import annotations

import base64
import hashlib
import io
import pickle
import zipfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from fleetbus_workers.environment.isolation.verifier import Verifier
from tests.support.fleet_platform.instance import Shop, served

KEY = "sk-test-0123456789"
TIME = "2026-01-01T00:00:00Z"


class Faults(msgspec.Struct, kw_only=True):
    """What goes wrong, in numbers of times (0: never)."""

    refuse_key: bool = False
    create_errors: list[tuple[int, Any]] = msgspec.field(default_factory=list)
    """Answers to the next attempts to make an instance: status and detail."""
    lose_create_answers: int = 0
    """Instances that are made and whose making is answered with 503."""
    pending_polls: int = 0
    end_in: str = "running"
    reset_fails: bool = False
    delete_errors: int = 0
    no_mcp: bool = False
    no_screen: bool = False
    verifier_errors: int = 0
    judge_errors: int = 0
    hold_create: anyio.Event | None = None
    instance_limit: int = 0


class Made(msgspec.Struct, kw_only=True):
    """One instance, also after its end."""

    instance_id: str
    body: dict[str, Any]
    request_id: str
    shop: Shop
    status: str = "running"
    polls: int = 0
    beats: int = 0
    stop: anyio.Event = msgspec.field(default_factory=anyio.Event)
    apps: dict[str, Starlette] = msgspec.field(default_factory=dict)


class FleetPlatform:
    """``requests`` are all that came in, as (method, path); ``instances`` all that were ever made, in order."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.instances: dict[str, Made] = {}
        self.requests: list[tuple[str, str]] = []
        self.keys: set[str] = set()
        self.bundles: dict[str, bytes] = {}
        self.uploads = 0
        self.changed = anyio.Event()
        self._verifier = Verifier()
        self._group: TaskGroup | None = None
        self._base = ""

    @property
    def running(self) -> list[Made]:
        return [made for made in self.instances.values() if made.status != "stopped"]

    def app(self) -> Any:
        """The application; made anew it still knows its instances, but none of them runs any more."""
        for made in self.instances.values():
            made.status = "stopped"
        api = Starlette(
            lifespan=self._lifespan,
            routes=[
                Route("/v1/env/instances", self._create, methods=["POST"]),
                Route("/v1/env/instances", self._list, methods=["GET"]),
                Route("/v1/env/instances/batch", self._delete_batch, methods=["DELETE"]),
                Route("/v1/env/instances/{id}", self._show, methods=["GET"]),
                Route("/v1/env/instances/{id}", self._delete, methods=["DELETE"]),
                Route("/v1/env/instances/{id}/heartbeat", self._beat, methods=["POST"]),
                Route("/v1/env/runs", self._runs, methods=["GET"]),
                Route("/v1/runner-auth/token", self._token, methods=["GET"]),
                Route("/v1/verifiers/check", self._check, methods=["GET"]),
                Route("/v1/verifiers/execute", self._execute, methods=["POST"]),
                Route("/i/{id}/api/v1/env/reset", self._reset, methods=["POST"]),
                Route("/i/{id}/api/v1/env/resources", self._resources, methods=["GET"]),
                Route("/i/{id}/api/v1/env/resources/sqlite/{name}/query", self._query, methods=["POST"]),
                Mount("/i/{id}", self._mcp),
            ],
        )

        async def noted(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                self.requests.append((scope["method"], scope["path"]))
                self.keys |= {value.decode() for name, value in scope["headers"] if name == b"authorization"}
                self._base = f"http://127.0.0.1:{scope['server'][1]}"
            await api(scope, receive, send)
            self._wake()

        return noted

    def _wake(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    async def until(self, condition: Any) -> None:
        with anyio.fail_after(50):
            while not condition():
                with anyio.move_on_after(0.05):
                    await self.changed.wait()

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self._verifier.run(), anyio.create_task_group() as self._group:
            yield
            self._group.cancel_scope.cancel()

    # Instances

    async def _create(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        body = await request.json()
        request_id = request.headers["x-request-id"]
        for made in self.instances.values():
            if made.request_id == request_id:
                detail = {"error": "duplicate_request_id", "instance_id": made.instance_id}
                return JSONResponse({"detail": detail}, status_code=409)
        if self.faults.create_errors:
            status, detail = self.faults.create_errors.pop(0)
            return JSONResponse({"detail": detail}, status_code=status)
        if 0 < self.faults.instance_limit <= len(self.running):
            detail = {"error_type": "instance_limit_exceeded", "message": f"You have {len(self.running)} running instances"}
            return JSONResponse({"detail": detail}, status_code=403)
        if self.faults.hold_create is not None:
            await self.faults.hold_create.wait()
        made = await self._made(body, request_id)
        if self.faults.lose_create_answers:
            self.faults.lose_create_answers -= 1
            return JSONResponse({"detail": "temporarily overloaded"}, status_code=503)
        return JSONResponse(self._described(made))

    async def _made(self, body: dict[str, Any], request_id: str) -> Made:
        number = len(self.instances) + 1
        made = Made(instance_id=f"inst{number}", body=body, request_id=request_id, shop=Shop())
        made.status = "pending" if self.faults.pending_polls else self.faults.end_in
        made.apps = made.shop.servers()
        if self.faults.no_screen:
            del made.apps["api/v1/mcp"]
        self.instances[made.instance_id] = made
        assert self._group is not None
        await self._group.start(self._run, made)
        return made

    async def _run(self, made: Made, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with AsyncExitStack() as stack:
            for app in made.apps.values():
                await stack.enter_async_context(served(app))
            task_status.started()
            await made.stop.wait()

    def _described(self, made: Made) -> dict[str, Any]:
        root = f"{self._base}/i/{made.instance_id}/"
        manager = f"{root}api/v1/env"
        names = ("reset", "diff", "snapshot", "execute_verifier_function", "execute_verifier_function_with_upload")
        body = made.body
        return {
            "instance_id": made.instance_id,
            "env_key": body["env_key"],
            "version": body.get("env_version", "v1"),
            "status": made.status,
            "subdomain": made.instance_id,
            "created_at": TIME,
            "updated_at": TIME,
            "team_id": "team",
            "region": body.get("region", "us-west-1"),
            "env_variables": body.get("env_variables"),
            "run_id": body.get("run_id"),
            "heartbeat_interval": body.get("heartbeat_interval"),
            "health": made.status == "running",
            "urls": {
                "root": root,
                "app": [root],
                "manager": {"api": manager, "docs": f"{manager}/docs", **{name: f"{manager}/{name}" for name in names}},
            },
        }

    def _refusal(self, request: Request) -> Response | None:
        if self.faults.refuse_key or request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"detail": f"the key {KEY} is not valid"}, status_code=401)
        return None

    def _found(self, request: Request) -> Made | None:
        made = self.instances.get(request.path_params["id"])
        return made if made is not None and made.status != "stopped" else None

    async def _list(self, request: Request) -> Response:
        run_id = request.query_params.get("run_id")
        found = [made for made in self.running if run_id in (None, made.body.get("run_id"))]
        return self._refusal(request) or JSONResponse([self._described(made) for made in found])

    async def _show(self, request: Request) -> Response:
        made = self._found(request)
        if made is None:
            return _absent()
        made.polls += 1
        if made.status == "pending" and made.polls >= self.faults.pending_polls:
            made.status = self.faults.end_in
        return self._refusal(request) or JSONResponse(self._described(made))

    async def _delete(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        if self.faults.delete_errors:
            self.faults.delete_errors -= 1
            return JSONResponse({"detail": "temporarily overloaded"}, status_code=503)
        made = self._found(request)
        return JSONResponse(self._ended(made)) if made is not None else _absent()

    def _ended(self, made: Made) -> dict[str, Any]:
        made.status = "stopped"
        made.stop.set()
        return self._described(made) | {"terminated_at": TIME}

    async def _delete_batch(self, request: Request) -> Response:
        run_id = request.query_params["run_id"]
        found = [made for made in self.running if made.body.get("run_id") == run_id]
        return self._refusal(request) or JSONResponse([self._ended(made) for made in found])

    async def _beat(self, request: Request) -> Response:
        made = self._found(request)
        if made is None:
            return _absent()
        made.beats += 1
        answer = {"success": True, "instance_id": made.instance_id, "last_heartbeat": TIME, "deadline_timestamp": 0.0}
        return self._refusal(request) or JSONResponse(answer)

    async def _runs(self, request: Request) -> Response:
        labels = {made.body.get("run_id") for made in self.instances.values()} - {None}
        runs = [
            {
                "run_id": label,
                "running_count": sum(made.body.get("run_id") == label for made in self.running),
                "total_count": sum(made.body.get("run_id") == label for made in self.instances.values()),
                "first_created_at": TIME,
                "last_created_at": TIME,
            }
            for label in sorted(labels, key=str)
        ]
        return self._refusal(request) or JSONResponse(runs)

    # Inside an instance

    async def _token(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse({"token": "runner"})

    async def _reset(self, request: Request) -> Response:
        made = self._found(request)
        if made is None or request.headers.get("x-runner-token") != "runner":
            return _absent()
        if self.faults.reset_fails:
            return JSONResponse({"detail": "cannot reset"}, status_code=400)
        made.shop.resets.append(await request.json())
        made.shop.fill()
        return JSONResponse({"success": True, "message": "reset"})

    async def _resources(self, request: Request) -> Response:
        return JSONResponse([{"name": "current", "type": "sqlite", "mode": "rw"}]) if self._found(request) else _absent()

    async def _query(self, request: Request) -> Response:
        made = self._found(request)
        if made is None:
            return _absent()
        question = await request.json()
        return JSONResponse(made.shop.query(question["query"], question.get("args") or []))

    async def _mcp(self, scope: Any, receive: Any, send: Any) -> None:
        made = self.instances.get(scope["path_params"]["id"])
        path = scope["path"].removeprefix(f"/i/{scope['path_params']['id']}/")
        app = made.apps.get(path) if made is not None and made.status == "running" and not self.faults.no_mcp else None
        if app is None:
            await _absent()(scope, receive, send)
            return
        await app({**scope, "path": "/mcp", "raw_path": b"/mcp", "root_path": ""}, receive, send)

    # Verifiers

    async def _check(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse({"success": request.query_params["sha256"] in self.bundles})

    async def _execute(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        asked = await request.json()
        if self.faults.verifier_errors:
            self.faults.verifier_errors -= 1
            return JSONResponse(_execution({"success": False, "error": {"message": "the executor was evicted"}}))
        if self.faults.judge_errors:
            self.faults.judge_errors -= 1
            return JSONResponse(_execution({"success": True, "result": 0.0, "stdout": "JUDGE ERROR: overloaded"}))
        if "bundle" in asked:
            bundle = base64.b64decode(asked["bundle"])
            if hashlib.sha256(bundle).hexdigest() != asked["sha256"]:
                return JSONResponse({"detail": "the hash is wrong"}, status_code=400)
            self.bundles[asked["sha256"]] = bundle
            self.uploads += 1
        if asked["sha256"] not in self.bundles:
            return JSONResponse({"detail": "bundle not found"}, status_code=404)
        made = self.instances.get(asked["args_array"][-1]["env"])
        if made is None or made.status != "running":
            return JSONResponse({"detail": "instance not found"}, status_code=400)
        return JSONResponse(_execution(await self._verified(self.bundles[asked["sha256"]], asked, made)))

    async def _verified(self, bundle: bytes, asked: dict[str, Any], made: Made) -> dict[str, Any]:
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            code = archive.read("verifier.py").decode()
            assert archive.read("requirements.txt")
        arguments = pickle.loads(base64.b64decode(asked["args"]))
        assert arguments["args"][0] is None
        given = arguments["kwargs"]
        verdict = await self._verifier.verify(
            code, final_answer=given.get("final_answer"), conversation=given.get("conversation", ()), tools=_Tools(made.shop)
        )
        if verdict.reward is None:
            return {"success": False, "error": {"type": "RuntimeError", "message": verdict.reason}}
        return {"success": True, "result": verdict.reward, "stdout": verdict.reason}


class _Tools:
    """What verifiers see of an instance."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        return await getattr(self._shop, name)(**arguments)

    async def query(self, sql: str, params: Any) -> Any:
        answer = self._shop.query(sql, list(params))
        if not answer["success"]:
            raise LookupError(answer["error"])
        return [dict(zip(answer["columns"], row, strict=True)) for row in answer["rows"]]


def _execution(outcome: dict[str, Any]) -> dict[str, Any]:
    return {"execution_time_ms": 1, "execution_id": "x1", "result": None, "error": None, "stdout": ""} | outcome


def _absent() -> Response:
    return JSONResponse({"detail": "not found"}, status_code=404)
