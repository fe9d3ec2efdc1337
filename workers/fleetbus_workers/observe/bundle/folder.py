"""The folder of a static copy: written beside its place, renamed when it is whole, and replaced by a later copy alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.errors import UserError
from fleetbus.files import create_folder
from fleetbus_schemas.message import UNREADABLE
from fleetbus_workers.observe import monitor
from fleetbus_workers.observe.bundle.page_script import build_index, join_modules

LISTING = "fleetbus-bundle.json"
"""The files of a copy: what a later one may replace."""

PAGE = Path(str(monitor.__file__)).with_name("page")

ANSWERS = Path(__file__).with_name("answers.js")


WITHOUT_SERVER = b"""
a[href^="/api/"], input[name="said"] { display: none; }
"""
"""What a copy cannot do is not shown."""


class BundleFolder:
    """The copy being written to ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0

    def add(self, name: str, content: bytes) -> None:
        """A file of the copy."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        self.bytes += len(content)

    def add_data(self, name: str, value: Any) -> None:
        """A script that gives ``value`` to the page under ``name``: as text, for in a script a key ``__proto__`` is none."""
        given = msgspec.json.encode(value, enc_hook=repr)  # MessagePack has values that JSON has not
        text = msgspec.json.encode(given.decode())
        self.add(f"data/{name}.js", b"fleetbus.give(%s,%s);\n" % (msgspec.json.encode(name), text))

    def add_page(self) -> None:
        """The page's own files, and what answers in place of a server."""
        modules = {file.name: file.read_text() for file in PAGE.glob("*.js")}
        self.add("page/style.css", (PAGE / "style.css").read_bytes() + WITHOUT_SERVER)
        self.add("page/page.js", join_modules(modules, "app.js").encode())
        self.add("page/answers.js", ANSWERS.read_bytes())
        scripts = ("page/answers.js", "data/run.js", "page/page.js")
        self.add("index.html", build_index((PAGE / "index.html").read_text(), scripts=scripts).encode())

    def list_files(self) -> list[str]:
        return sorted(str(file.relative_to(self.path)) for file in self.path.rglob("*") if file.is_file())


def check_folder(output: Path) -> None:
    """Raise `UserError` if ``output`` has anything in it that is no earlier copy."""
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise UserError(f"{output} is no folder: give another --output")
    if not output.is_dir() or not any(output.iterdir()):
        return
    try:
        known = msgspec.json.decode((output / LISTING).read_bytes(), type=list[str])
    except (OSError, *UNREADABLE):
        raise UserError(f"{output} is not empty and no copy that fleetbus bundle made: give another --output") from None
    held = {str(file.relative_to(output)) for file in output.rglob("*") if not file.is_dir() or file.is_symlink()}
    if foreign := sorted(held - {*known, LISTING}):
        raise UserError(f"{output} holds {foreign[0]}, which fleetbus bundle did not write: give another --output")


@contextmanager
def write_folder(output: Path) -> Iterator[BundleFolder]:
    """The copy at ``output`` for the length of the block: it stands there once the block ends by itself, in place of an
    earlier one; an error leaves what was there. Raises `UserError` as `check_folder` does."""
    check_folder(output)
    output = output.absolute()
    create_folder(output.parent)
    part, earlier = (output.with_name(f".{output.name}.{os.getpid()}.{kind}") for kind in ("part", "earlier"))
    try:
        part.mkdir()
        folder = BundleFolder(part)
        yield folder
        folder.add(LISTING, msgspec.json.encode(folder.list_files()))
        check_folder(output)  # minutes may have passed
        if output.is_dir():
            output.rename(earlier)
        try:
            part.rename(output)
        except OSError:
            if earlier.is_dir():
                earlier.rename(output)
            raise
        shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)
