"""Servers by name: ``process:KIND:COMMAND``, ``docker:KIND:IMAGE [ARGUMENTS]`` and ``kubernetes:KIND:IMAGE [ARGUMENTS]``.

KIND is a kind of environment that takes a URL. The server is started for each episode, and the environment plays on its URL.
"""

import shlex

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_workers.environment.adapter_context import AdapterContext
from fleetbus_workers.environment.adapters.providers.base import Provider
from fleetbus_workers.environment.adapters.providers.docker import DockerProvider, check_docker_installed
from fleetbus_workers.environment.adapters.providers.kubernetes import KubernetesProvider, check_kubernetes_installed
from fleetbus_workers.environment.adapters.providers.process import ProcessProvider
from fleetbus_workers.environment.adapters.providers.provisioned_environment import ServerHost

KINDS = {"openenv": "openenv:{url}", "remote-gym": "remote-gym:{url}", "http": "http:{url}/mcp"}
"""Kinds of environments on a server, and their specs."""


def build(context: AdapterContext) -> ServerHost:
    """The servers that a spec asks for. Raises `UserError` when it names no kind, or what its provider needs is not there."""
    spec, form, settings = context.spec, context.form, context.settings
    kind, _, target = context.rest.partition(":")
    if kind not in KINDS or not target.strip():
        example = "process:openenv:uvicorn module:app --port {port}" if form == "process" else f"{form}:openenv:IMAGE"
        raise UserError(f"environment {spec!r} must name a kind ({', '.join(KINDS)}) and what to start, as in {example}")
    context.build_factory(KINDS[kind].format(url="http://127.0.0.1:9"))  # so that a missing package is reported now
    return ServerHost(
        _build_provider(spec, form, target, settings),
        lambda url: context.build_factory(KINDS[kind].format(url=url)),
        run=settings.run.name,
        ready_seconds=settings.limits.open,
        episode_seconds=settings.limits.episode,
    )


def _build_provider(spec: str, form: str, target: str, settings: Configuration) -> Provider:
    if form == "process":
        listed = settings.environment.pass_variables.split(",")
        return ProcessProvider(target, passed=tuple(filter(None, map(str.strip, listed))))
    try:
        image, *command = shlex.split(target)
    except ValueError as error:
        raise UserError(f"environment {spec!r}: the command cannot be read: {error}") from error
    container = settings.container
    if form == "docker":
        check_docker_installed()
        return DockerProvider(
            image, port=container.port, command=command, memory_bytes=container.memory_bytes, cpus=container.cpus
        )
    check_kubernetes_installed()
    return KubernetesProvider(
        image,
        port=container.port,
        namespace=container.namespace,
        command=command,
        memory_bytes=container.memory_bytes,
        cpus=container.cpus,
    )
