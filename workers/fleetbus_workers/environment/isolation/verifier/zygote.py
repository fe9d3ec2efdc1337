"""The process that runs verifier code: it waits, warm, and forks one child per verification. Standard library alone.

Started by `sandbox.py` beside it, as a rule inside an isolation, with an empty environment, as ``python -I -S
zygote.py FD LIMITS [READABLE]``: READABLE (JSON) is what may be read where there is no isolation. On FD arrive sockets, one
byte and one descriptor each. The child talks JSON over that socket, each frame after its length in four bytes: first comes the
request, then the child may ask for calls, and its last frame is the verdict. When the other end of the socket closes, the child
is killed; when a child exits, the zygote reports it on its socket; when FD closes, all exit.
"""

from __future__ import annotations

import datetime  # noqa: F401
import gc
import json
import math  # noqa: F401
import opcode
import os
import re  # noqa: F401
import resource
import select
import signal
import socket
import struct
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "sandbox", "inside"))

TYPE_CHECKING = False  # the module typing would double the memory that every fork has to copy tables for
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any, NoReturn

    from fleetbus_workers.environment.isolation.sandbox.inside import confine, landlock, read_only, verifier_call

else:
    import confine
    import landlock
    import read_only
    import verifier_call


FIRST_USER = confine.FIRST_USER + 0x20000000
OUTPUT_CHARACTERS = 2000
MODULE_REMEDY = ": verifiers import Python's standard library alone"
CALL_BYTES = 1 << 20
"""Largest call that the worker takes in (`sandbox.channel.MAX_RECEIVED_BYTES`)."""

CHANNEL = 3
REHEARSAL = '''
import json, math, re

async def verify(env, final_answer, conversation):
    """Uses what verifiers use."""
    rows = await env.query("SELECT price FROM items WHERE name = ?", ["1"])
    return 1.0 if (final_answer or "").strip() == str(rows[0][0]) and f"{len(conversation)}" else 0.0
'''
NEW_USERS, NEW_NETWORK = 0x10000000, 0x40000000
PARENT_DEATH_SIGNAL = 1


def main() -> None:
    """Import in advance, drop rights that children do not need, report readiness on FD, and fork per request."""
    control = socket.socket(fileno=int(sys.argv[1]))
    limits = json.loads(sys.argv[2])
    hidden = True
    if len(sys.argv) > 3:
        leave_network()
        hidden = landlock.restrict_file_access(json.loads(sys.argv[3]))
    warm_up()
    forbid_calls()  # here and not in every child: it costs as much as a quarter of a verification
    try:
        control.send(b"h" if hidden else b"v")
    except OSError:
        return  # the worker is gone already
    gc.collect()
    gc.freeze()  # so that a child's first collection does not copy every page
    serve(control, limits)


def forbid_calls() -> None:
    """Refuse the system calls that no verifier needs, for this process and its children."""
    read_only.forbid_changes()
    confine.forbid_calls()


def leave_network() -> None:
    """Enter a namespace without any network, where that is permitted; the filter of system calls forbids sockets anyway."""
    if sys.platform == "linux" and confine.LIBRARY.unshare(NEW_NETWORK) != 0:
        confine.LIBRARY.unshare(NEW_USERS | NEW_NETWORK)


def warm_up() -> None:
    """Run a verification here, where it is harmless: what it touches now is no page fault in every child (1 of 3 ms)."""
    time.strptime("2000", "%Y")  # what it imports late may be out of reach then
    code = compile(REHEARSAL, "<verifier>", "exec", dont_inherit=True)
    load_imports(code)
    request = json.loads(frame({"final_answer": "1", "conversation": [{"role": "user", "content": "\u00e9"}]})[4:])
    assert verifier_call.call_verifier(code, request, Echo()) == 1.0


def serve(control: socket.socket, limits: dict[str, int]) -> None:
    """Fork a child for each socket that arrives, kill it when that socket closes, and end with ``control``."""
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake, select.POLLIN)
    children: dict[int, int] = {}
    sockets: dict[int, int] = {}
    while True:
        for ready, _ in poll.poll():
            if ready == wake.fileno():
                wake.recv(4096)
                reap(children, sockets, poll)
            elif ready == control.fileno():
                _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
                if not descriptors:
                    signal.set_wakeup_fd(-1)
                    for pid in children:
                        os.kill(pid, signal.SIGKILL)
                    return
                channel = descriptors[0]
                pid = start(channel, limits)
                if pid:
                    children[pid], sockets[channel] = channel, pid
                    poll.register(channel, 0)  # its closing is reported all the same
            elif ready in sockets:
                os.kill(sockets[ready], signal.SIGKILL)
                poll.unregister(ready)  # the death of the child does the rest


def start(channel: int, limits: dict[str, int]) -> int:
    """Fork a child for ``channel``; its process id, 0 if the system permits no more processes."""
    try:
        pid = os.fork()
    except OSError as error:
        send_last_message(channel, {"error": f"no process for the verifier: {error}"})
        return 0
    if pid == 0:
        try:
            run_child(channel, limits)
        finally:
            os._exit(1)
    return pid


def reap(children: dict[int, int], sockets: dict[int, int], poll: select.poll) -> None:
    """Reap the children that have exited and report it on their sockets."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        channel = children.pop(pid)
        del sockets[channel]
        try:
            poll.unregister(channel)
        except KeyError:
            pass
        send_last_message(channel, {"died": os.waitstatus_to_exitcode(status)})


def send_last_message(channel: int, message: dict[str, object]) -> None:
    """Tell the other end, if it is still there, and close."""
    with socket.socket(fileno=channel) as last:
        last.setblocking(False)
        try:
            last.send(frame(message))
        except OSError:
            pass


def run_child(channel: int, limits: dict[str, int]) -> NoReturn:
    """One verification: the request, the code under ``limits`` and without rights, the verdict. Never returns.

    A request with ``reuse`` is followed by others if it leads to a verdict, each run in a scope of its own: a fork costs twice
    the CPU time of everything else that an episode needs.
    """
    zygote = os.getppid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(channel, CHANNEL)
    os.dup2(0, 1)
    os.dup2(0, 2)
    os.closerange(CHANNEL + 1, os.sysconf("SC_OPEN_MAX"))
    connection = Connection(socket.socket(fileno=CHANNEL))
    request = connection.receive()
    reuse, has_rights = request.get("reuse", False), True
    confine.set_limits({name: limit for name, limit in limits.items() if name != "CPU"} if reuse else limits)
    while True:
        output = Output()
        sys.stdout = sys.stderr = output
        if reuse:
            allow_cpu(limits["CPU"])
        try:
            code = compile(request["code"], "<verifier>", "exec", dont_inherit=True)
            load_imports(code)
            if has_rights:
                drop_rights(zygote)
                has_rights = False
            answer: dict[str, Any] = {"reward": verifier_call.call_verifier(code, request, connection)}
        except BaseException as error:  # noqa: BLE001 - raised by the code: the verdict is that there is none
            remedy = MODULE_REMEDY if isinstance(error, ModuleNotFoundError) else ""
            answer = {"error": f"{type(error).__name__}: {error}{remedy}"[:OUTPUT_CHARACTERS]}
        connection.send(answer | {"output": output.tail()})
        if not reuse or "error" in answer:
            os._exit(0)
        request = connection.receive()


def allow_cpu(seconds: int) -> None:
    """Limit CPU time to so many whole seconds from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + seconds
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    except (OSError, ValueError):
        pass


def drop_rights(zygote: int) -> None:
    """Keep nothing that is not needed; after this the code may run."""
    confine.drop_privileges(FIRST_USER + os.getpid())
    confine.block_signals()
    if sys.platform == "linux":
        confine.LIBRARY.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != zygote:
            os._exit(1)


def load_imports(code: CodeType) -> None:
    """Import the modules of the standard library that the code imports: later their files may be out of reach."""
    extended = 0
    for position in range(0, len(code.co_code), 2):
        operation, argument = code.co_code[position], code.co_code[position + 1] | extended
        extended = argument << 8 if operation == opcode.EXTENDED_ARG else 0
        if operation == opcode.opmap["IMPORT_NAME"]:
            name = code.co_names[argument]
            if name.partition(".")[0] in sys.stdlib_module_names:
                try:
                    __import__(name)
                except ImportError:
                    pass
    for constant in code.co_consts:
        if hasattr(constant, "co_code"):
            load_imports(constant)


class Echo:
    """Answers the rehearsal."""

    def ask(self, call: str, *arguments: Any) -> Any:
        return [[json.loads(frame({"arguments": arguments})[4:])["arguments"][1][0]]]


class CallFailed(RuntimeError):
    """A call that the worker refused, or that failed there."""


class Connection:
    """The child's end of its socket. Exits when the worker's end has closed."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def send(self, message: dict[str, object]) -> None:
        self._channel.sendall(frame(message))

    def receive(self) -> dict[str, Any]:
        (length,) = struct.unpack("!I", self._read(4))
        message: dict[str, Any] = json.loads(self._read(length))
        return message

    def _read(self, count: int) -> bytes:
        data = self._channel.recv(count, socket.MSG_WAITALL)
        if len(data) < count:
            os._exit(1)
        return data

    def ask(self, call: str, *arguments: Any) -> Any:
        """The answer to a call. One that is too large is refused here, where the code may judge it: what it holds may be the
        policy's, which would have no verdict otherwise."""
        called = frame({"call": call, "arguments": arguments})
        if (size := len(called) - 4) > CALL_BYTES:
            raise CallFailed(f"the call has {size} bytes as JSON, and may have {CALL_BYTES}")
        self._channel.sendall(called)
        answer = self.receive()
        if "error" in answer:
            raise CallFailed(answer["error"])
        return answer["result"]


class Output:
    """Standard output and error of the code: the last characters are kept, for the reason when there is no verdict."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self._text = ""

    def write(self, text: str) -> int:
        self._text = (self._text + text)[-OUTPUT_CHARACTERS:]
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def tail(self) -> str:
        return self._text


def frame(message: dict[str, object]) -> bytes:
    """A message as JSON after its length in four bytes."""
    payload = json.dumps(message).encode()
    return struct.pack("!I", len(payload)) + payload


if __name__ == "__main__":
    main()
