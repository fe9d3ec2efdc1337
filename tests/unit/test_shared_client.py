"""The connection that a process shares: a process that was forked from it makes its own."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import multiprocessing, os, sys
from contextlib import contextmanager
from fleetbus.client import blocking

@contextmanager
def open_client(portal, url, run):
    yield portal

async def find_process():
    return os.getpid()

def call():
    sys.exit(blocking.get_shared_client("u", "r").call(find_process) != os.getpid())

blocking.open_client = open_client
blocking.get_shared_client("u", "r")
child = multiprocessing.get_context("fork").Process(target=call)
child.start()
child.join(10)
child.kill()
sys.exit(child.exitcode if child.exitcode is not None else "the call of the forked process did not end")
"""


def test_a_forked_process_calls_on_a_loop_of_its_own() -> None:
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")
