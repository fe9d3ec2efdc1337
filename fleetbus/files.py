"""Files that are whole or not there: readers, also after a crash, never see a partial file."""

import os
from pathlib import Path


def replace_file(file: Path, content: bytes) -> None:
    """Write a file, in place of the one that is there. Not synced: what a power cut leaves is the system's."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
