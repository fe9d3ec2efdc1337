"""Reads tasks from a file, a folder, HTTP, S3 or any other place that fsspec knows, in versions that every message names.

A location is a path or a URL of a tasks file, or of a folder of them. ``LOCATION@VERSION`` names a version: it stands where the
location says ``{version}``, else it is a folder below the location. A dataset is identified by its version, and without one by
the hash of the bytes, so that a file that was changed between two runs is another dataset. Everything is read and checked
before a run starts. HTTP and S3 need ``pip install 'fleetbus[datasets]'``, Parquet too.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from fleetbus.errors import UserError

SUFFIXES = (".json", ".parquet")
"""Ends of the names of tasks files in a folder. A ``.jsonl`` must be named itself: those in a folder may be anything."""

NESTED = "openenv"
"""A folder that may stand between a version and its files, as in Fleet's buckets."""

MAX_BYTES = 1 << 30
INSTALL = "pip install 'fleetbus[datasets]'"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One file that was read: its ``name`` for people, without credentials, and its bytes."""

    name: str
    data: bytes


class Files(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a dataset and what they are called in messages: ``v0.2``, or ``sha256:`` and 16 digits."""

    sources: tuple[Source, ...]
    version: str


def is_remote(location: str) -> bool:
    """True if a location is a URL."""
    return _URL.match(location) is not None


def split_version(location: str) -> tuple[str, str]:
    """A location without its version, and the version, if it has one. What exists under its whole name has none."""
    if not is_remote(location) and Path(location).expanduser().exists():
        return location, ""
    base, mark, version = location.rpartition("@")
    if not mark or "/" in version:
        return location, ""
    if not base or not _VERSION.fullmatch(version):
        raise UserError(
            f"{redact_location(location)}: {version!r} is not a version; use letters, digits, dots and dashes, as in data@v0.2"
        )
    return base, version


def read_dataset_files(location: str) -> Files:
    """All files of a dataset. Raises `UserError` naming the place and what to do."""
    base, version = split_version(location)
    if "{version}" in base and not version:
        raise UserError(
            f"{redact_location(location)}: contains {{version}} but no version is given; end it with @VERSION, as in ...@v0.2"
        )
    place = base.replace("{version}", version) if "{version}" in base else _join_version(base, version)
    store = _Store(place)
    paths = store.files()
    if not paths:
        raise UserError(_describe_missing(base, version, place))
    try:
        sources = tuple(Source(name=redact_location(path), data=store.read(path)) for path in paths)
    except FileNotFoundError:
        raise UserError(_describe_missing(base, version, place)) from None
    digest = hashlib.sha256()
    for source in sources:
        digest.update(hashlib.sha256(source.data).digest())
    return Files(sources=sources, version=version or f"sha256:{digest.hexdigest()[:16]}")


def redact_location(location: str) -> str:
    """A location as it may be shown: without user names, passwords and query strings."""
    if not is_remote(location):
        return location
    parts = urlsplit(location)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _join_version(base: str, version: str) -> str:
    return f"{base.rstrip('/')}/{version}" if version else base


def _describe_missing(base: str, version: str, place: str) -> str:
    if version:
        above = base.partition("{version}")[0] if "{version}" in base else base
        versions = _Store(above).folders()
        if versions:
            return f"{redact_location(base)}: has no version {version}; there are {', '.join(versions)}"
        return f"{redact_location(place)}: there is no version {version}"
    if not is_remote(place) and Path(place).expanduser().is_dir():
        return f"{place}: is a folder without tasks files (*{', *'.join(SUFFIXES)}); give the path of a tasks file"
    what = "there is nothing" if is_remote(place) else "there is no such file"
    return f"{redact_location(place)}: {what}; give the path of a tasks file, or of a folder of them"


class _Store:
    """A place, seen through fsspec; local files need no fsspec."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._remote = is_remote(place)
        self._system: Any = _open_file_system(place) if self._remote else None

    def files(self) -> list[str]:
        """The tasks files at the place: itself, or those in the folder that it is."""
        if not self._remote:
            path = Path(self._place).expanduser()
            if not path.is_dir():
                return [str(path)] if path.exists() else []
            folder = path / NESTED if not _select_task_files(map(str, path.glob("*"))) and (path / NESTED).is_dir() else path
            return _select_task_files(str(file) for file in folder.iterdir())
        if urlsplit(self._place).path.endswith((*SUFFIXES, ".jsonl")):
            return [self._place]
        return self._remote_folder(self._place) or self._remote_folder(posixpath.join(self._place, NESTED))

    def _remote_folder(self, place: str) -> list[str]:
        return _select_task_files(name for name, is_folder in self._entries(place) if not is_folder)

    def folders(self) -> list[str]:
        """Names of the folders at the place; none if it cannot be listed."""
        if not self._remote:
            path = Path(self._place).expanduser()
            return sorted(folder.name for folder in path.iterdir() if folder.is_dir()) if path.is_dir() else []
        try:
            return sorted(posixpath.basename(name.rstrip("/")) for name, is_folder in self._entries(self._place) if is_folder)
        except UserError:
            return []

    def _entries(self, place: str) -> list[tuple[str, bool]]:
        """Names with their protocol, and whether they are folders."""
        try:
            listed: Sequence[dict[str, object]] = self._system.ls(place, detail=True)
        except FileNotFoundError:
            return []
        except Exception as error:  # every store has its own errors
            raise UserError(f"{redact_location(place)}: cannot be listed: {_summarise_error(error)}") from error
        return [(self._system.unstrip_protocol(entry["name"]), entry["type"] == "directory") for entry in listed]

    def read(self, path: str) -> bytes:
        """The bytes of a file. Raises `FileNotFoundError`, and `UserError` for everything else."""
        try:
            if not self._remote:
                return Path(path).read_bytes()
            with self._system.open(path, "rb") as file:
                data: bytes = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            raise
        except Exception as error:  # every store has its own errors
            raise UserError(f"{redact_location(path)}: cannot be read: {_summarise_error(error)}") from error
        if len(data) > MAX_BYTES:
            raise UserError(f"{redact_location(path)}: is larger than {MAX_BYTES} bytes; split it")
        return data


def _open_file_system(place: str) -> object:
    scheme = place.partition("://")[0]
    try:
        import fsspec
    except ImportError as error:
        raise UserError(f"{redact_location(place)}: needs fsspec: {INSTALL}") from error
    try:
        return fsspec.filesystem(scheme)
    except ImportError as error:
        raise UserError(f"{redact_location(place)}: {scheme} needs more packages: {INSTALL}") from error
    except ValueError as error:
        raise UserError(
            f"{redact_location(place)}: {scheme} is not supported by fsspec; use a path, https:// or s3://"
        ) from error


def _select_task_files(names: Any) -> list[str]:
    return sorted(name for name in names if name.endswith(SUFFIXES))


def _summarise_error(error: Exception) -> str:
    """The first line of an error, without what a URL in it may hold."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"]+", lambda found: redact_location(found[0]), text)
