"""A fork server imports this first, and with it what `fleetbus_process.prepare_server` asks for. Standard library alone.

Beside the packages that are imported here, nothing runs. One that cannot be imported is left to the episode that needs it.
"""

from __future__ import annotations

import importlib
import json
import os
from contextlib import suppress

VARIABLE = "FLEETBUS_PRELOAD"
"""The names of modules, and the PYTHONPATH that episodes find."""


def preload() -> None:
    modules, path = json.loads(os.environ.pop(VARIABLE, "[[], null]"))
    if path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = path
    for name in modules:
        with suppress(Exception, SystemExit):  # foreign code: the package itself says what is wrong with it when it needs it
            importlib.import_module(name)


preload()
