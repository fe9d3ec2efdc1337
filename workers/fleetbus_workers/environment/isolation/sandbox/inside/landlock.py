"""Takes the sight of files from this process and all that it starts, without namespaces and without rights (Linux 5.13).

Standard library alone. Landlock: https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import sys

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_QUESTION, PATH_BENEATH = 1, 1
NO_NEW_PRIVILEGES = 38
EXECUTE, READ_FILE, READ_FOLDER = 1, 4, 8
FIRST_RIGHTS, RENAME_ACROSS, TRUNCATE = (1 << 13) - 1, 1 << 13, 1 << 14
"""All rights of the first version, and one each of the second and the third."""

LIBRARY = ctypes.CDLL(None, use_errno=True)


def restrict_file_access(paths: list[str]) -> bool:
    """True if from now on nothing but ``paths`` and what is below them can be read or run, and nothing be written."""
    if sys.platform != "linux":
        return False
    version = LIBRARY.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION_QUESTION)
    if version < 1:
        return False
    handled = FIRST_RIGHTS | (RENAME_ACROSS if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    ruleset = LIBRARY.syscall(CREATE_RULESET, struct.pack("=Q", handled), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return False
    try:
        for path in paths:
            allow(ruleset, path)
        LIBRARY.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return bool(LIBRARY.syscall(RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def allow(ruleset: int, path: str) -> None:
    """Let what is below ``path`` be read and executed under ``ruleset``."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there needs no right
    try:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        rights = EXECUTE | READ_FILE | (READ_FOLDER if is_folder else 0)
        LIBRARY.syscall(ADD_RULE, ruleset, PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)
