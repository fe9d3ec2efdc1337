"""Servers by name: ``process:KIND:COMMAND``, ``docker:KIND:IMAGE [ARGUMENTS]`` and ``kubernetes:KIND:IMAGE [ARGUMENTS]``.

KIND is a kind of environment that takes a URL. The server is started for each episode, and the environment plays on its URL.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_workers.environment.providers.base import Provider
from fleetbus_workers.environment.providers.provided import InnerFactory, ServerHost

KINDS = {"openenv": "openenv:{url}", "remote-gym": "remote-gym:{url}", "http": "http:{url}/mcp"}
"""Kinds of environments on a server, and their specs."""


def server_host(spec: str, form: str, rest: str, inner: Callable[[str], InnerFactory], settings: Configuration) -> ServerHost:
    """The servers that a spec asks for. ``inner`` makes the factory for the spec of an environment on one of them.

    Raises `UserError` when the spec names no kind, or what its provider needs is not there.
    """
    kind, _, what = rest.partition(":")
    if kind not in KINDS or not what.strip():
        example = "process:openenv:uvicorn module:app --port {port}" if form == "process" else f"{form}:openenv:IMAGE"
        raise UserError(f"environment {spec!r} must name a kind ({', '.join(KINDS)}) and what to start, as in {example}")
    inner(KINDS[kind].format(url="http://127.0.0.1:9"))  # so that what is not installed is told now
    return ServerHost(
        _provider(spec, form, what, settings),
        lambda url: inner(KINDS[kind].format(url=url)),
        run=settings.run.name,
        ready_seconds=settings.limits.open,
        episode_seconds=settings.limits.episode,
    )


def _provider(spec: str, form: str, what: str, settings: Configuration) -> Provider:
    if form == "process":
        from fleetbus_workers.environment.providers.process import ProcessProvider

        return ProcessProvider(what)
    try:
        image, *command = shlex.split(what)
    except ValueError as error:
        raise UserError(f"environment {spec!r}: the command cannot be read: {error}") from error
    container = settings.container
    if form == "docker":
        from fleetbus_workers.environment.providers.docker import DockerProvider, check_docker_installed

        check_docker_installed()
        return DockerProvider(
            image, port=container.port, command=command, memory_bytes=container.memory_bytes, cpus=container.cpus
        )
    from fleetbus_workers.environment.providers.kubernetes import KubernetesProvider, check_kubernetes_installed

    check_kubernetes_installed()
    return KubernetesProvider(
        image,
        port=container.port,
        namespace=container.namespace,
        command=command,
        memory_bytes=container.memory_bytes,
        cpus=container.cpus,
    )
