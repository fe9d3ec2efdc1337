"""Servers for an episode in containers of a real Docker engine: `just test-docker`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import pytest

from fleetbus_workers.environment.adapters.providers.base import ProvidedServer, wait_until_ready
from fleetbus_workers.environment.base import EnvironmentFailed
from fleetbus_workers.environment.ownership import build_process_owner
from tests.support.processes import until
from tests.support.server_labels import labels


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
    from fleetbus_workers.environment.adapters.providers.docker import DockerProvider

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
    assert await containers.find_problem(server) == ""
    found.kill()
    await until(lambda: engine.containers.get(server.name).status == "exited")
    assert (await containers.find_problem(server)).startswith("exit code 137")
    await containers.stop(server)
    await containers.stop(server)


@pytest.mark.docker
@pytest.mark.timeout(300)
async def test_a_container_that_cannot_run_is_told_and_removed(engine: Any) -> None:
    from fleetbus_workers.environment.adapters.providers.docker import DockerProvider

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
    dead = f"{build_process_owner().rpartition('_')[0]}_1"
    orphan, living = await containers.start(labels(owner=dead)), await containers.start(labels())
    assert await containers.sweep() == [orphan.name]
    assert engine.containers.get(living.name).status == "running"
    await containers.stop(ProvidedServer(name=living.name, url=""))
