"""The version of the installed package, as recordings, workers and traces tell it."""

from importlib.metadata import PackageNotFoundError, version


def read_fleetbus_version() -> str:
    """The installed version, empty when the package runs from source."""
    try:
        return version("fleetbus")
    except PackageNotFoundError:
        return ""
