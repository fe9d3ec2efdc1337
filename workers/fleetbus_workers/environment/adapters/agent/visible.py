"""The files that an agent in the sandbox may read: its program and what is installed, without names that begin with a dot.

Of the folder in which an agent lies it gets its own file, or the package that this is part of: beside it lie tasks with answers
and verifiers, held-out ones too. What else it reads is listed (``environment.agent_files``).
"""

import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

LINKS = 40
"""As many links as the kernel follows."""

SYSTEM = (
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/ssl",
    "/etc/pki",
    "/etc/ca-certificates",
    "/etc/mime.types",
    "/usr/share",
    "/usr/local/bin",
)


def list_visible(command: Sequence[str], listed: Iterable[str]) -> list[Path]:
    """Files and folders that ``command`` needs, as far as one can tell, and those that are ``listed``."""
    found: dict[Path, None] = {Path(path): None for path in SYSTEM}
    found |= dict.fromkeys(_list_program(Path(command[0])))
    if command[0] == sys.executable:
        found |= dict.fromkeys(_list_imports())
    words = [Path(word) for word in command[1:] if os.path.isabs(word)]
    found |= dict.fromkeys(path for path in words if path != Path.cwd())
    found |= {Path(path).resolve(): None for path in listed if path}
    return [path for path in found if path.exists() and path != Path("/")]


def list_module(name: str) -> Path | None:
    """The folder of the outermost package that an imported module is part of, or its own file if it is in none; None for a
    module without a file."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        module = sys.modules[".".join(parts[:count])]
        if module.__file__ is not None:
            return Path(module.__file__).parent if hasattr(module, "__path__") else Path(module.__file__)
    return None


def list_hidden(visible: Sequence[Path], secrets: Iterable[Path]) -> list[Path]:
    """Entries of visible folders that an agent must not see: ``secrets``, and entries whose names begin with a dot,
    unless something visible lies in them."""
    hidden = [place for path in secrets for place in _list_places(path.resolve(), visible)]
    for folder in visible:
        if folder.is_dir():
            hidden += [entry for entry in folder.iterdir() if entry.name.startswith(".") and not entry.is_symlink()]
    return [path for path in dict.fromkeys(hidden) if not any(each == path or path in each.parents for each in visible)]


def _list_places(path: Path, folders: Sequence[Path]) -> Iterator[Path]:
    """The places at which a path, which holds no link, is seen: a folder may be reached by a link."""
    for folder in folders:
        if path.is_relative_to(real := folder.resolve()):
            yield folder / path.relative_to(real)


def _list_program(program: Path) -> Iterator[Path]:
    """A program, every link to it, and all of its virtual environment."""
    link = program
    for _ in range(LINKS):
        yield link
        if not link.is_symlink():
            break
        link = link.parent / link.readlink()
    prefix = program.parent.parent
    configuration = prefix / "pyvenv.cfg"
    if not configuration.is_file():
        return
    yield prefix
    for line in configuration.read_text(errors="replace").splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "home":
            yield Path(value.strip()).parent / "lib"
    for listing in prefix.glob("lib*/python*/site-packages/*.pth"):
        for line in listing.read_text(errors="replace").splitlines():
            if os.path.isabs(line.strip()) and os.path.isdir(line.strip()):
                yield from _list_importable(Path(line.strip()))


def _list_imports() -> Iterator[Path]:
    """The folders that this Python imports from, fleetbus included, but for the current folder."""
    yield Path(sys.prefix)
    for path in sys.path:
        if os.path.isabs(path) and os.path.isdir(path) and path != os.getcwd():
            yield from _list_importable(Path(path))
    for name in ("fleetbus", "fleetbus_schemas", "fleetbus_workers"):
        yield from map(Path, importlib.import_module(name).__path__)


def _list_importable(folder: Path) -> Iterator[Path]:
    """A folder of packages, or what can be imported of one that holds anything else as well."""
    if folder.name in ("site-packages", "dist-packages", "lib-dynload") or folder.is_relative_to(sys.base_prefix):
        yield folder
        return
    for entry in folder.iterdir():
        if entry.suffix in (".py", ".so") or (entry.name.isidentifier() and any(entry.glob("*.py"))):
            yield entry
