"""The release of fleetbus that runs."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def read_fleetbus_version() -> str:
    """The installed version, empty when the package runs from source."""
    try:
        return version("fleetbus")
    except PackageNotFoundError:
        return ""
