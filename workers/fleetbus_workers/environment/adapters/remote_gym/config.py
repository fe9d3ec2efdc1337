"""Settings of the way to remote-gym servers: the client's keys of a task's ``config``; the rest of it goes to the server.

The keys are those of the protocol's own client. Two differ on purpose: ``timeout`` and back-off together end with the stage's
time limit, and ``token`` names an environment variable (``$NAME``), because a task travels in messages that are kept.
"""

import os
from collections.abc import Callable, Mapping, Sequence

import msgspec

from fleetbus.errors import UserError
from fleetbus_workers.environment.task_permissions import TaskPermissions, check_http_address

TOKEN_VARIABLE = "GYM_API_KEY"


class RemoteGymConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds unless said otherwise. ``retries``: failed tries that are repeated; a busy answer is no failure.

    The pause after failure k (from 0) is ``backoff`` 2^k, at most ``max_delay``, times a random number that begins at
    ``backoff_jitter_min`` and is at most ``backoff_jitter_range`` more. ``failover_after_failures``: failures in a row until
    another URL is tried. ``idempotent``: the servers answer a repeated request from memory, so that repeating a step is safe;
    a server may say so itself (``"idempotent": true`` at ``/health``).
    """

    base_urls: tuple[str, ...] = ()
    timeout: float = 120.0
    retries: int = 6
    backoff: float = 0.5
    max_delay: float = 16.0
    backoff_jitter_min: float = 0.7
    backoff_jitter_range: float = 0.6
    token: str = ""
    log_retries: bool = True
    failover_after_failures: int = 1
    idempotent: bool = False

    def pause(self, failures: int, draw: Callable[[], float]) -> float:
        """Seconds to wait after that many failures, at least 1; ``draw`` gives numbers in [0, 1)."""
        grown = min(self.backoff * 2.0 ** min(failures - 1, 60), self.max_delay)
        return grown * (self.backoff_jitter_min + self.backoff_jitter_range * draw())


def read_config(
    config: Mapping[str, object], default_urls: Sequence[str], permissions: TaskPermissions
) -> tuple[RemoteGymConfig, dict[str, object]]:
    """The client's part of a task's config, and the server's. Raises `UserError` with what is wrong, or `NotPermitted`."""
    permissions = msgspec.structs.replace(permissions, urls=(*default_urls, *permissions.urls))
    own = {name: config[name] for name in RemoteGymConfig.__struct_fields__ if config.get(name) is not None}
    remote = {name: value for name, value in config.items() if name not in (*RemoteGymConfig.__struct_fields__, "url_file")}
    own["base_urls"] = tuple([permissions.check_url(url) for url in _read_urls(config)] or default_urls)
    own["token"] = _read_token(config.get("token"), permissions)
    try:
        settings = msgspec.convert(own, RemoteGymConfig)
    except msgspec.ValidationError as error:
        raise UserError(f"the remote gym's config is invalid: {error}") from error
    if not settings.base_urls:
        raise UserError("no remote-gym server: write remote-gym:URL[,URL...], or base_urls in the task's config, and list them")
    pauses = (settings.backoff, settings.max_delay, settings.backoff_jitter_min, settings.backoff_jitter_range)
    if settings.timeout <= 0 or settings.failover_after_failures < 1 or min(settings.retries, *pauses) < 0:
        raise UserError(
            "the remote gym's config is invalid: timeout and failover_after_failures must be positive, none negative"
        )
    return settings, remote


def parse_urls(text: str) -> list[str]:
    """URLs separated by commas, semicolons or lines, comments skipped. Raises `UserError` for what is none."""
    lines = [line.strip() for line in text.replace(";", "\n").replace(",", "\n").splitlines()]
    return [_check_url(line) for line in lines if line and not line.startswith("#")]


def _check_url(url: str) -> str:
    check_http_address(f"remote-gym:{url}", url, example="http://127.0.0.1:8000", secret=TOKEN_VARIABLE)
    return url.rstrip("/")


def _read_urls(config: Mapping[str, object]) -> list[str]:
    given = config.get("base_urls")
    if isinstance(given, str):
        return parse_urls(given)
    if given:
        if not isinstance(given, list | tuple) or not all(isinstance(url, str) for url in given):
            raise UserError("base_urls must be a list of URLs, or text with one per line")
        return [_check_url(url) for url in given]
    if config.get("url_file"):
        raise UserError("url_file is not read: a task names no files; write its URLs into the spec, as remote-gym:URL,URL")
    return []


def _read_token(given: object, permissions: TaskPermissions) -> str:
    if not given:
        return os.environ.get(TOKEN_VARIABLE, "")
    if not isinstance(given, str) or not given.startswith("$"):
        raise UserError("token must name an environment variable, as in $GYM_API_KEY: tasks are stored in the log")
    name = given[1:]
    return os.environ.get(name if name == TOKEN_VARIABLE else permissions.check_variable(name), "")
