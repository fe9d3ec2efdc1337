"""Servers that are started for an episode: processes of this machine for real, Kubernetes against recorded answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import httpx
import psutil
import pytest

from fleetbus.config.settings import Configuration, LimitSettings, RunSettings
from fleetbus.errors import UserError
from schemas import Action, Task, ToolCall
from tests.support.processes import children, until, until_said
from tests.support.tool_use import NoGrader
from workers.environment.base import EnvironmentFailed
from workers.environment.providers.base import (
    Labels,
    Server,
    is_abandoned,
    label_value,
    owner_of_this_process,
    wait_until_ready,
)
from workers.environment.providers.kubernetes import KubernetesProvider
from workers.environment.providers.process import ProcessProvider
from workers.environment.specs import EnvironmentFactory, environment_factory

SERVER = Path(__file__).parents[1] / "support" / "served_environment.py"
GONE = "somewhere_999999999_1"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def labels(*, owner: str | None = None, seconds: int = 600) -> Labels:
    return Labels(run="r1", episode="task 1", owner=owner or owner_of_this_process(), expires=int(time.time()) + seconds)


def served(mode: str = "", *, ready_seconds: float = 50.0) -> EnvironmentFactory:
    configuration = Configuration(run=RunSettings(name="r1"), limits=LimitSettings(open=ready_seconds))
    spec = f"process:http:{sys.executable} {SERVER} {{port}} {mode}".strip()
    return environment_factory(spec, verifier=NoGrader(), configuration=configuration)


async def test_an_episode_is_played_on_a_server_of_its_own_that_is_stopped_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETBUS_SECRET", "s3cret")
    factory = served()
    async with factory.running():
        first, second = factory(), factory()
        with anyio.fail_after(55):
            await first.open(Task(key="task 1", prompt="Look."))
            await first.reset()
            step = await first.step(Action(episode_id="e", attempt=1, turn=0, text="", tool_calls=(ToolCall(name="look"),)))
            running = children()
            await first.close()
        assert "FLEETBUS_SERVER_RUN=r1 FLEETBUS_SERVER_EPISODE=task-1 FLEETBUS_SECRET=None" in str(step.messages[0].content)
        assert running
        await until(lambda: not children())
        await second.close()


@pytest.mark.parametrize(
    ("mode", "words"), [("fail", "ended before it was ready: exit code 1: no database"), ("hang", "not ready")]
)
async def test_a_server_that_never_answers_fails_its_episode_alone_and_is_stopped(mode: str, words: str) -> None:
    factory = served(mode, ready_seconds=2.0 if mode == "hang" else 50.0)
    async with factory.running():
        environment = factory()
        with pytest.raises(EnvironmentFailed, match=words):
            await environment.open(Task(key="t", prompt="p"))
        await environment.close()
        await until(lambda: not children())


async def test_an_episode_that_is_given_up_while_its_server_starts_leaves_nothing() -> None:
    factory = served("hang")
    async with factory.running():
        environment = factory()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(environment.open, Task(key="t", prompt="p"))
            await until(lambda: bool(children()))
            tasks.cancel_scope.cancel()
        await environment.close()
        await until(lambda: not children())


async def test_servers_that_were_not_stopped_are_stopped_with_the_worker() -> None:
    provider = ProcessProvider(f"{sys.executable} -m http.server --bind 127.0.0.1 {{port}}")
    server = await provider.start(labels())
    await wait_until_ready(provider, server, path="/", seconds=50)
    await provider.close()
    await until(lambda: not children())
    await provider.stop(server)


WORKER = """
import anyio, sys
from workers.environment.providers.base import *
from workers.environment.providers.process import ProcessProvider

async def main():
    provider = ProcessProvider(f"{sys.executable} -m http.server --bind 127.0.0.1 {{port}}")
    server = await provider.start(Labels(run="r", episode="e", owner=owner_of_this_process(), expires=1 << 40))
    await wait_until_ready(provider, server, path="/", seconds=40)
    print("ready", flush=True)
    await anyio.sleep_forever()

anyio.run(main)
"""


async def test_a_killed_worker_takes_its_servers_with_it() -> None:
    async with await anyio.open_process([sys.executable, "-c", WORKER], stderr=None) as worker:
        await until_said(worker.stdout, b"ready")
        processes = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
    assert processes
    await until(lambda: not any(process.is_running() for process in processes))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not show the variables of processes")
async def test_a_sweep_ends_what_a_dead_worker_left_and_nothing_else() -> None:
    def left(owner: str, expires: int) -> subprocess.Popen[bytes]:
        variables = {**os.environ, "FLEETBUS_SERVER_OWNER": owner, "FLEETBUS_SERVER_EXPIRES": str(expires)}
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=variables)

    mine = owner_of_this_process()
    dead = f"{mine.rpartition('_')[0]}_1"  # this process's id, but started at another time
    later = int(time.time()) + 600
    orphan, expired, living, foreign = left(dead, later), left(mine, 1), left(mine, later), left(GONE, later)
    try:
        removed = await ProcessProvider(f"{sys.executable} {{port}}").sweep()
        assert {str(orphan.pid), str(expired.pid)} <= set(removed)
        assert orphan.wait(20) == expired.wait(20) == -9
        assert living.poll() is None and foreign.poll() is None
    finally:
        for process in (orphan, expired, living, foreign):
            process.kill()
            process.wait()


def test_labels_are_such_that_every_system_takes_them() -> None:
    assert label_value("warehouse-17") == "warehouse-17"
    assert label_value("a task / with é") == "a-task---with"
    assert len(label_value("x" * 99)) == 63
    assert all(label_value(value) == value for value in labels().named().values())


def test_what_is_abandoned_is_told_from_what_is_not() -> None:
    mine = owner_of_this_process()
    assert not is_abandoned(mine, "2000", now=1999)
    assert is_abandoned(mine, "2000", now=2001)
    assert is_abandoned(f"{mine.rpartition('_')[0]}_1", "2000", now=1999)
    assert not is_abandoned(GONE, "2000", now=1999), "of another machine: only its time tells"
    assert not is_abandoned("", "", now=1)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("process:", "must name a kind"),
        ("process:openenv:", "must name a kind"),
        ("docker:warehouse:image", "must name a kind (openenv, remote-gym, http)"),
        ("process:http:python -m my_server", "must say where its port goes"),
        ("process:http:no-such-command {port}", "there is no command 'no-such-command'"),
        ("process:http:python '{port}", "cannot be read"),
    ],
)
def test_a_mistake_in_a_spec_gets_one_line(spec: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        environment_factory(spec, verifier=NoGrader())
    assert words in str(caught.value) and "\n" not in str(caught.value)


class Cluster(BaseHTTPRequestHandler):
    """Answers as an API server does, from what was recorded of the calls that the provider makes."""

    protocol_version = "HTTP/1.1"
    jobs: dict[str, dict[str, Any]]
    asked: list[tuple[str, str]]
    phases: list[str]
    refuse: dict[str, int]

    def do_POST(self) -> None:
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._seen()
        if not self._refused("POST"):
            self.jobs[job["metadata"]["name"]] = job
            self._answer(201, {**job, "metadata": {**job["metadata"], "uid": "u", "namespace": "training"}, "status": {}})

    def do_GET(self) -> None:
        self._seen()
        if self._refused("GET"):
            return
        if "/pods" in self.path:
            phase = self.phases.pop(0) if len(self.phases) > 1 else self.phases[0]
            status: dict[str, Any] = {"phase": phase}
            if phase == "Running":
                status["podIP"] = "127.0.0.1"
            if phase == "Failed":
                ended = {"terminated": {"exitCode": 3, "reason": "Error"}}
                status["containerStatuses"] = [
                    {"name": "environment", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": ended}
                ]
            pod = {"metadata": {"name": "pod-1"}, "spec": {"containers": []}, "status": status}
            self._answer(200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": [pod] if phase else []})
        else:
            self._answer(200, {"kind": "JobList", "apiVersion": "batch/v1", "metadata": {}, "items": list(self.jobs.values())})

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._seen()
        name = self.path.partition("?")[0].rpartition("/")[2]
        if self.jobs.pop(name, None) is None:
            self._answer(404, failure(404, f'jobs.batch "{name}" not found'))
        else:
            self._answer(200, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"})

    def _refused(self, method: str) -> bool:
        code = self.refuse.get(method, 0)
        if code:
            self._answer(code, failure(code, "jobs.batch is forbidden: no rights here"))
        return bool(code)

    def _seen(self) -> None:
        self.asked.append((self.command, self.path))

    def _answer(self, code: int, content: dict[str, Any]) -> None:
        payload = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None:
        pass


def failure(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "code": code}


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
contexts: [{{name: here, context: {{cluster: recorded, user: me}}}}]
clusters: [{{name: recorded, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: me, user: {{token: s3cret}}}}]
"""


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[type[Cluster], KubernetesProvider]]:
    pytest.importorskip("lightkube")
    handler = type("Recorded", (Cluster,), {"jobs": {}, "asked": [], "phases": ["", "Pending", "Running"], "refuse": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever)
        thread.start()
        (tmp_path / "kubeconfig").write_text(KUBECONFIG.format(port=server.server_port))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        provider = KubernetesProvider(
            "environment:1", port=8000, namespace="training", command=("serve", "--fast"), variables={"SIZE": "4"},
        )  # fmt: skip
        yield handler, provider
        await provider.close()
        await anyio.to_thread.run_sync(server.shutdown)
        thread.join()


async def test_a_job_is_created_waited_for_and_deleted(cluster: tuple[type[Cluster], KubernetesProvider]) -> None:
    handler, provider = cluster
    with anyio.fail_after(50):
        server = await provider.start(labels())
        assert server.url == "http://127.0.0.1:8000"
        job = handler.jobs[server.name]
        assert await provider.problem(server) == ""
        await provider.stop(server)
        await provider.stop(server)
    assert handler.jobs == {}
    assert job["metadata"]["labels"]["fleetbus/run"] == "r1"
    assert job["spec"]["template"]["metadata"]["labels"]["fleetbus/episode"] == "task-1"
    assert 590 <= job["spec"]["activeDeadlineSeconds"] <= 600
    assert (job["spec"]["backoffLimit"], job["spec"]["ttlSecondsAfterFinished"]) == (0, 60)
    pod = job["spec"]["template"]["spec"]
    assert (pod["restartPolicy"], pod["automountServiceAccountToken"]) == ("Never", False)
    (container,) = pod["containers"]
    assert (container["image"], container["args"]) == ("environment:1", ["serve", "--fast"])
    assert container["env"] == [{"name": "SIZE", "value": "4"}]
    assert container["resources"]["limits"] == {"memory": str(2 << 30), "cpu": "1000m"}
    deletions = [path for method, path in handler.asked if method == "DELETE"]
    assert deletions[0].startswith(f"/apis/batch/v1/namespaces/training/jobs/{server.name}")


async def test_a_pod_that_fails_is_told_and_its_job_deleted(cluster: tuple[type[Cluster], KubernetesProvider]) -> None:
    handler, provider = cluster
    handler.phases[:] = ["Pending", "Failed"]
    with anyio.fail_after(50), pytest.raises(EnvironmentFailed, match=r"ended at once: exit code 3 \(Error\)"):
        await provider.start(labels())
    assert handler.jobs == {}


async def test_a_start_that_is_given_up_deletes_its_job(cluster: tuple[type[Cluster], KubernetesProvider]) -> None:
    handler, provider = cluster
    handler.phases[:] = ["Pending"]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(provider.start, labels())
        await until(lambda: bool(handler.jobs))
        tasks.cancel_scope.cancel()
    assert handler.jobs == {}


async def test_missing_rights_are_told_in_the_words_of_the_cluster(cluster: tuple[type[Cluster], KubernetesProvider]) -> None:
    handler, provider = cluster
    handler.refuse["POST"] = 403
    with pytest.raises(EnvironmentFailed, match=r"did not create a Job: jobs\.batch is forbidden"):
        await provider.start(labels())


async def test_a_sweep_deletes_abandoned_jobs_alone(cluster: tuple[type[Cluster], KubernetesProvider]) -> None:
    handler, provider = cluster

    def job(name: str, marks: Labels) -> None:
        handler.jobs[name] = {
            "metadata": {"name": name, "labels": {key.replace(".", "/"): value for key, value in marks.named().items()}}
        }

    job("kept", labels())
    job("foreign", labels(owner=GONE))
    job("expired", labels(owner=GONE, seconds=-1))
    assert await provider.sweep() == ["expired"]
    assert set(handler.jobs) == {"kept", "foreign"}
    assert any("labelSelector=fleetbus" in path for _, path in handler.asked)


async def test_without_a_cluster_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("lightkube")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(EnvironmentFailed, match="set KUBECONFIG"):
        await KubernetesProvider("image", port=1).start(labels())


@pytest.fixture
def engine() -> Any:
    docker = pytest.importorskip("docker")
    try:
        client = docker.from_env(timeout=60)
        client.images.get("python:3.11-slim")
    except docker.errors.DockerException as error:
        pytest.skip(f"needs a Docker engine with the image python:3.11-slim: {error}")
    yield client
    client.close()


@pytest.fixture
async def containers(engine: Any) -> AsyncIterator[Any]:
    from workers.environment.providers.docker import DockerProvider

    provider = DockerProvider(
        "python:3.11-slim", port=8000, command=("python", "-m", "http.server", "8000"), memory_bytes=256 << 20
    )
    yield provider
    await provider.close()
    left = engine.containers.list(all=True, filters={"label": "fleetbus.run=r1"}, ignore_removed=True)
    for container in left:
        container.remove(force=True)
    assert left == []


@pytest.mark.docker
@pytest.mark.timeout(300)
async def test_a_container_is_started_within_limits_on_loopback_and_removed(engine: Any, containers: Any) -> None:
    server = await containers.start(labels())
    await wait_until_ready(containers, server, path="/", seconds=100)
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(server.url)).status_code == 200
    found = engine.containers.get(server.name)
    assert found.labels["fleetbus.run"] == "r1" and found.labels["fleetbus.episode"] == "task-1"
    settings = found.attrs["HostConfig"]
    assert (settings["Memory"], settings["NanoCpus"], settings["PidsLimit"]) == (256 << 20, 10**9, 512)
    assert settings["CapDrop"] == ["ALL"] and settings["PortBindings"]["8000/tcp"][0]["HostIp"] == "127.0.0.1"
    assert await containers.problem(server) == ""
    found.kill()
    await until(lambda: engine.containers.get(server.name).status == "exited")
    assert (await containers.problem(server)).startswith("exit code 137")
    await containers.stop(server)
    await containers.stop(server)


@pytest.mark.docker
@pytest.mark.timeout(300)
async def test_a_container_that_cannot_run_is_told_and_removed(engine: Any) -> None:
    from workers.environment.providers.docker import DockerProvider

    for image, command, words in (
        ("fleetbus-no-such-image", (), "there is no image|did not start"),
        ("python:3.11-slim", ("no-such-program",), "no-such-program"),
        ("python:3.11-slim", ("python", "-c", "raise SystemExit('no database')"), "no database"),
    ):
        provider = DockerProvider(image, port=8000, command=command)
        with pytest.raises(EnvironmentFailed, match=words):
            server = await provider.start(labels())
            try:
                await wait_until_ready(provider, server, path="/", seconds=60)
            finally:
                await provider.stop(server)
        await provider.close()
    assert engine.containers.list(all=True, filters={"label": "fleetbus.run=r1"}, ignore_removed=True) == []


@pytest.mark.docker
@pytest.mark.timeout(300)
async def test_a_container_start_that_is_given_up_leaves_nothing(engine: Any, containers: Any) -> None:
    with anyio.move_on_after(0.05):
        await containers.start(labels())
    assert engine.containers.list(all=True, filters={"label": "fleetbus.run=r1"}, ignore_removed=True) == []


@pytest.mark.docker
@pytest.mark.timeout(300)
async def test_a_sweep_removes_the_containers_of_dead_workers_alone(engine: Any, containers: Any) -> None:
    dead = f"{owner_of_this_process().rpartition('_')[0]}_1"
    orphan, living = await containers.start(labels(owner=dead)), await containers.start(labels())
    assert await containers.sweep() == [orphan.name]
    assert engine.containers.get(living.name).status == "running"
    await containers.stop(Server(name=living.name, url=""))
