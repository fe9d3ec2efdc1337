"""Files with secrets: there with their content and their rights at once, or not at all."""

import os
import secrets
from pathlib import Path


def create_secret_file(file: Path, content: bytes, *, readable: bool = False) -> bool:
    """Write a file that is not there; False if it is. Whoever is cut off leaves no part of it under its name."""
    if os.path.lexists(file):
        return False
    temporary = _write_beside(file, content, readable=readable)
    try:
        os.link(temporary, file)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def replace_secret_file(file: Path, content: bytes, *, readable: bool = False) -> None:
    """Write a file anew; whoever reads it meanwhile reads one or the other."""
    os.replace(_write_beside(file, content, readable=readable), file)


def _write_beside(file: Path, content: bytes, *, readable: bool) -> Path:
    """A file of another name in the same folder, on the disk, whose rights it has from the beginning."""
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644 if readable else 0o600)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(descriptor)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
