"""Files with secrets: there with their content and their rights at once, or not at all."""

import os
from pathlib import Path


def create_secret_file(file: Path, content: bytes, *, readable: bool = False) -> bool:
    """Write a file that is not there; False if it is. Never more than a moment between its name and its rights."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644 if readable else 0o600)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(content)
    return True


def replace_secret_file(file: Path, content: bytes, *, readable: bool = False) -> None:
    """Write a file anew; whoever reads it meanwhile reads one or the other."""
    temporary = file.with_name(file.name + ".part")
    temporary.unlink(missing_ok=True)
    create_secret_file(temporary, content, readable=readable)
    os.replace(temporary, file)
