"""Servers for an episode as Kubernetes Jobs, against the answers of a cluster's API as they were recorded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import pytest

from fleetbus_workers.environment.adapters.providers.kubernetes import KubernetesProvider
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.ownership import Labels
from tests.support.processes import until
from tests.support.server_labels import GONE, labels


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


@pytest.mark.integration
async def test_a_job_is_created_waited_for_and_deleted(cluster: tuple[type[Cluster], KubernetesProvider]) -> None:
    handler, provider = cluster
    with anyio.fail_after(50):
        server = await provider.start(labels())
        assert server.url == "http://127.0.0.1:8000"
        job = handler.jobs[server.name]
        assert await provider.find_problem(server) == ""
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
            "metadata": {"name": name, "labels": {key.replace(".", "/"): value for key, value in marks.to_mapping().items()}}
        }

    job("kept", labels())
    job("foreign", labels(owner=GONE))
    job("expired", labels(owner=GONE, seconds=-1))
    assert await provider.sweep() == ["expired"]
    assert set(handler.jobs) == {"kept", "foreign"}
    assert any("labelSelector=fleetbus" in path for _, path in handler.asked)


@pytest.mark.integration
async def test_without_a_cluster_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("lightkube")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(EnvironmentFailed, match="set KUBECONFIG"):
        await KubernetesProvider("image", port=1).start(labels())
