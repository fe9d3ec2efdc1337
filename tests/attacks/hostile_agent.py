"""An agent that does what it should not, then tells what came of it in a call: ``python hostile_agent.py``."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

LINGER = "import time; time.sleep(600)"


def read_files(*paths: str) -> dict[str, str]:
    """What can be read of these, and of the variables of every process in sight."""
    found = {}
    for path in (*paths, *map(str, Path("/proc").glob("[0-9]*/environ"))):
        try:
            data = Path(path).read_bytes() if Path(path).is_file() else str(sorted(os.listdir(path))).encode()
        except OSError:
            continue
        if int(Path(path).parent.name) != os.getpid() if path.endswith("/environ") else data not in (b"", b"[]"):
            found[path] = data.decode(errors="replace")
    return found


def look_at_processes() -> dict[str, Any]:
    """What /proc shows of this process, of others, and whether anything there can be changed."""
    readable = {}
    for folder in Path("/proc").glob("[0-9]*"):
        for name in ("environ", "mem", "fd", "root/etc/shadow"):
            try:
                path = folder / name
                content = [os.readlink(path / number) for number in os.listdir(path)] if name == "fd" else path.read_bytes()
                readable[str(path)] = str(content)
            except OSError:
                continue
    try:
        Path("/proc/self/oom_score_adj").write_text("500")
        changed = "written"
    except OSError as error:
        changed = str(error.strerror)
    own = Path("/proc/self/status").read_text().splitlines()[0]
    mine = f"/proc/{os.getpid()}/"
    others = {path: text for path, text in readable.items() if text != "[]" and not path.startswith(mine)}
    return {"own": own, "processes": sorted(os.listdir("/proc")), "others": others, "changed": changed}


def connect(port: int) -> str:
    """Whether another port of this machine, or the network, can be reached."""
    for address in (("127.0.0.1", port), ("192.0.2.1", 80), ("8.8.8.8", 53)):
        try:
            with socket.create_connection(address, timeout=2):
                return f"reached {address}"
        except OSError:
            continue
    return "nothing"


def leave_grandchildren(mark: str) -> str:
    """Two processes in sessions of their own that outlive their parents, one without the labels that it was given."""
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {LINGER!r}, {mark!r}], start_new_session=True)"
    for environment in ({}, dict(os.environ)):
        subprocess.run([sys.executable, "-c", start], env=environment, check=True)
    return "left"


def fill_folder(megabytes: int) -> str:
    """Many files, each below the limit of one."""
    for number in range(megabytes // 8):
        Path(f"{number}.bin").write_bytes(b"x" * (8 << 20))
    time.sleep(600)
    return "filled"


def fill_memory() -> str:
    held = []
    while True:
        held.append(b"x" * (16 << 20))


def kill_others() -> str:
    """Signal all that can be signalled."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        os.kill(-1, signal.SIGTERM)
    except OSError:
        pass
    try:
        os.kill(os.getppid(), signal.SIGKILL)
    except OSError:
        pass
    return "signalled"


def use_other_key(key: str) -> str:
    """Ask and grade in another session."""
    answers = []
    for path, body in (("/chat/completions", {"messages": [{"role": "user", "content": "mine"}]}), ("/reward", {"reward": 1})):
        try:
            post(path, body, key)
            answers.append("accepted")
        except urllib.error.HTTPError as error:
            answers.append(str(error.code))
    return " ".join(answers)


def post(path: str, body: dict[str, Any], key: str) -> None:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


ATTACKS: dict[str, Callable[..., Any]] = {
    attack.__name__: attack
    for attack in (
        read_files,
        look_at_processes,
        connect,
        leave_grandchildren,
        fill_folder,
        fill_memory,
        kill_others,
        use_other_key,
    )
}


def play(task: dict[str, Any]) -> None:
    told = ATTACKS[task["config"]["attack"]](*task["config"].get("with", ()))
    post("/chat/completions", {"messages": [{"role": "user", "content": json.dumps(told)}]}, os.environ["OPENAI_API_KEY"])


if __name__ == "__main__":
    play(json.loads(Path(os.environ["FLEETBUS_TASK_FILE"]).read_text()))
