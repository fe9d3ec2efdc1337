"""A verifier of a worker that is not root tries to reach processes and files of the same user, without namespaces."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fleetbus_workers.environment.isolation import verifier

NOBODY = 65534
MAY_FAIL = {"setxattr", "ptrace", "process memory"}
"""What some file systems and the settings of some machines refuse to everybody."""

ATTACKS = {
    "kill": "os.kill(victim, 15)",
    "kill its group": "os.kill(0, 0)",
    "sigqueue": "libc.sigqueue(victim, 10, None) and fail()",
    "F_SETOWN": "fcntl.fcntl(descriptor, 8, victim)",
    "F_SETSIG": "fcntl.fcntl(descriptor, 10, 15)",
    "F_SETOWN_EX": "fcntl.fcntl(descriptor, 15, struct.pack('ii', 1, victim))",
    "FIOSETOWN": "fcntl.ioctl(descriptor, 0x8901, struct.pack('i', victim))",
    "SIOCSPGRP": "fcntl.ioctl(descriptor, 0x8902, struct.pack('i', victim))",
    "prlimit": "resource.prlimit(victim, resource.RLIMIT_NOFILE, (3, 3))",
    "setpriority": "os.setpriority(os.PRIO_PROCESS, victim, 19)",
    "setpriority of the user": "os.setpriority(os.PRIO_USER, 0, 19)",
    "sched_setaffinity": "os.sched_setaffinity(victim, {0})",
    "sched_setscheduler": "os.sched_setscheduler(victim, os.SCHED_IDLE, os.sched_param(0))",
    "ioprio_set": "libc.syscall(IOPRIO_SET, 1, victim, 3 << 13) and fail()",
    "ptrace": "libc.ptrace(16, victim, 0, 0) and fail()",
    "process memory": "open(f'/proc/{victim}/mem', 'r+b')",
    "oom_score_adj": "open(f'/proc/{victim}/oom_score_adj', 'w')",
    "chmod": "os.chmod(path, 0o777)",
    "fchmod": "os.fchmod(os.open(path, os.O_RDONLY), 0o777)",
    "chown": "os.chown(path, -1, -1)",
    "utime": "os.utime(path, (1, 1))",
    "setxattr": "os.setxattr(path, 'user.x', b'x')",
    "truncate": "os.truncate(path, 0)",
    "open to write": "open(path, 'r+')",
    "unlink": "os.unlink(path)",
    "rename": "os.rename(path, path + '2')",
    "new file": "open(path + '3', 'w')",
    "new folder": "os.mkdir(path + '4')",
    "link": "os.link(path, path + '5')",
}
PROGRAM = """
import ctypes, fcntl, importlib.util, json, os, resource, socket, struct, subprocess, sys

libc = ctypes.CDLL(None, use_errno=True)
IOPRIO_SET = 251 if os.uname().machine == "x86_64" else 30
source, attacks, folder, user = json.loads(sys.stdin.read())
spec = importlib.util.spec_from_file_location("zygote", source)
zygote = importlib.util.module_from_spec(spec)
spec.loader.exec_module(zygote)
if user is not None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
ends = socket.socketpair()


def fail():
    raise OSError(ctypes.get_errno(), "refused")


def attempt(attack, victim, path, confined):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        reason = "succeeded"
        try:
            os.setsid()
            if confined:
                zygote.forbid_calls()
                zygote.drop_rights(os.getppid())
            exec(attack, globals() | {"victim": victim, "path": path, "descriptor": ends[0].fileno()})
        except BaseException as error:
            reason = type(error).__name__
        os.write(writing, reason.encode())
        os._exit(0)
    os.close(writing)
    reason = os.read(reading, 100).decode()
    os.close(reading)
    os.waitpid(child, 0)
    return reason


results = {}
for name, attack in attacks.items():
    for confined in (False, True):
        path = os.path.join(folder, f"{list(attacks).index(name)}-{confined}")
        with open(path, "w") as file:
            file.write("content")
        with subprocess.Popen(["/bin/sh", "-c", "echo; exec sleep 60"], stdout=subprocess.PIPE) as victim:
            victim.stdout.readline()
            reason = attempt(attack, victim.pid, path, confined)
            victim.kill()
        results.setdefault(name, []).append(reason)
print(json.dumps(results))
"""
ZYGOTE = Path(verifier.__file__).with_name("zygote.py")


@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="the filter of system calls needs Linux")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="there is no filter for this machine")
def test_a_verifier_reaches_no_process_and_no_file_of_its_user() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = os.geteuid() == 0  # under root, verifiers have users of their own: this is about a worker that has not
        if root:
            os.chown(folder, NOBODY, NOBODY)
        completed = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            input=json.dumps([str(ZYGOTE), ATTACKS, folder, NOBODY if root else None]),
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
            cwd="/",
        )
    assert completed.returncode == 0, completed.stderr
    results = json.loads(completed.stdout)
    assert results.keys() == ATTACKS.keys()
    harmless = {name: without for name, (without, _) in results.items() if without != "succeeded" and name not in MAY_FAIL}
    assert not harmless, "these attack nothing"
    assert {name: reason for name, (_, reason) in results.items() if reason != "PermissionError"} == {}
