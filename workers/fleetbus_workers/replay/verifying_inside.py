"""The process that runs verifier code for a replay: `verifier/zygote.py`, whose children give many verdicts.

A fork costs twice the CPU time of everything else that an episode needs. Episodes of a recording need no protection from each
other, so a child takes one request after the other, each run in a scope of its own. The host is as well protected from them as
from the verifiers of a worker. Standard library alone; arguments as there.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys

sys.path.insert(
    0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "environment", "isolation", "verifier")
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from fleetbus_workers.environment.isolation.sandbox.inside import confine
    from fleetbus_workers.environment.isolation.verifier import zygote
else:
    import zygote
    from zygote import confine


def run_child(channel: int, limits: dict[str, int]) -> NoReturn:
    """Answer requests until the other end closes. Before each, the limit of CPU time is moved ahead of what was used."""
    parent = os.getppid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(channel, zygote.CHANNEL)
    os.dup2(0, 1)
    os.dup2(0, 2)
    os.closerange(zygote.CHANNEL + 1, os.sysconf("SC_OPEN_MAX"))
    connection = zygote.Connection(socket.socket(fileno=zygote.CHANNEL))
    request = connection.receive()
    confine.set_limits({name: limit for name, limit in limits.items() if name != "CPU"})
    has_rights = True
    while True:
        output = zygote.Output()
        sys.stdout = sys.stderr = output
        allow_cpu(limits["CPU"])
        try:
            code = compile(request["code"], "<verifier>", "exec", dont_inherit=True)
            zygote.load_imports(code)
            if has_rights:
                zygote.drop_rights(parent)
                has_rights = False
            answer: dict[str, Any] = {"reward": zygote.to_plain_number(zygote.call_verifier(code, request, connection))}
        except BaseException as error:  # no verdict here: the worker's own way of verifying decides what that means
            answer = {"error": f"{type(error).__name__}: {error}"[: zygote.OUTPUT_CHARACTERS]}
        connection.send(answer | {"output": output.tail()})
        if "error" in answer:
            os._exit(0)
        request = connection.receive()


def allow_cpu(seconds: int) -> None:
    """So many whole seconds from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + seconds
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    except (OSError, ValueError):
        pass


if __name__ == "__main__":
    zygote.run_child = run_child
    zygote.main()
