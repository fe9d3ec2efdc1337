"""Permits the config of a task to name outside of its episode only what the operator listed in the settings.

A task comes from a file that somebody else may have written, or over a gateway from anybody who may open a session. So its
``config`` chooses no address, no environment variable and no module by itself, and no file at all.
"""

import importlib.metadata
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from fleetbus.config.load import strip_credentials
from fleetbus.config.settings import EnvironmentSettings
from fleetbus.errors import UserError
from fleetbus_workers.environment.base import EnvironmentFailed

_PATH = re.compile(r"[/\\\0]|^~|^\.\.?$")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


class NotPermitted(EnvironmentFailed):
    """The task's config names what the operator has not listed; the message says which setting would."""


class TaskPermissions(msgspec.Struct, frozen=True, kw_only=True):
    """``urls`` begin what a task may have called (``*``: anything), ``variables`` are environment variables that may be sent
    there, ``modules`` may be imported with all below them."""

    urls: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def check_url(self, url: str) -> str:
        """The URL, if its origin is that of a listed one and its path lies below; raises `NotPermitted`."""
        if any(each == "*" or _is_below(url, each) for each in self.urls):
            return url
        raise NotPermitted(f"the task's config names the server {url}, which --environment-task-urls does not list")

    def check_variable(self, name: str) -> str:
        """The name of a variable that may be sent; raises `NotPermitted`."""
        if name in self.variables:
            return name
        raise NotPermitted(f"the task's config names the variable {name}, which --environment-task-variables does not list")

    def check_module(self, name: str, *, framework: str) -> str:
        """The name of a module that may be imported: listed, or of an installed package that is made for ``framework``. Raises
        `NotPermitted`."""
        listed = any(name == each or name.startswith(f"{each}.") for each in self.modules)
        if _MODULE.fullmatch(name) and (listed or name.partition(".")[0] in list_plugin_modules(framework)):
            return name
        raise NotPermitted(
            f"the task's config names the module {name}, which --environment-task-modules does not list and no installed "
            f"package for {framework} has"
        )


def read_permissions(settings: EnvironmentSettings) -> TaskPermissions:
    """The permissions that an operator set."""
    return TaskPermissions(
        urls=_split(settings.task_urls), variables=_split(settings.task_variables), modules=_split(settings.task_modules)
    )


def check_arguments(value: object, where: str) -> Any:
    """JSON-like arguments for somebody's constructor, if no text in them can be a file's name; raises `NotPermitted`."""
    if isinstance(value, str):
        if _PATH.search(value):
            raise NotPermitted(f"the task's {where} has {value[:80]!r}, which can be a path: a task names no files")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_arguments(key, where)
            check_arguments(item, where)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_arguments(item, where)
    return value


@lru_cache(maxsize=8)
def list_plugin_modules(framework: str) -> frozenset[str]:
    """The top-level modules of installed distributions that require ``framework``, and itself."""
    names = {framework}
    for module, distributions in importlib.metadata.packages_distributions().items():
        for distribution in distributions:
            requires = importlib.metadata.requires(distribution) or ()
            if distribution != "fleetbus" and any(re.match(rf"{framework}\b", each, re.IGNORECASE) for each in requires):
                names.add(module)
    return frozenset(names)


def _is_below(url: str, listed: str) -> bool:
    """True if both have one origin and the listed path is the beginning of the other's."""
    ours, theirs = urlsplit(url), urlsplit(listed)
    if (ours.scheme, ours.hostname, ours.port) != (theirs.scheme, theirs.hostname, theirs.port) or ours.username:
        return False
    path, prefix = ours.path.rstrip("/"), theirs.path.rstrip("/")
    return ".." not in path.split("/") and "%" not in path and (path == prefix or path.startswith(f"{prefix}/"))


def _split(text: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, text.split(","))))


def check_http_address(spec: str, url: str, *, example: str, secret: str = "") -> SplitResult:
    """The parts of an HTTP address. Raises `UserError` that shows ``spec`` without its credentials, and an ``example``, if
    ``url`` is none, or has a password: specs are shown and stored. ``secret`` is the environment variable that takes one
    instead."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or any(character.isspace() for character in url):
        shown, address = strip_credentials(spec), strip_credentials(url)
        raise UserError(f"environment {shown!r}: {address!r} is not an address such as {example}")
    if parts.username or parts.password:
        instead = f"set {secret} instead" if secret else "settings are written to files"
        raise UserError(f"the address of {parts.hostname} must not hold a password: {instead}")
    return parts
