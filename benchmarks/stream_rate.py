"""Measures the entries that one nats-server stores a second: in a run's log, and in one or several plain streams.

    python benchmarks/stream_rate.py --json --streams 1,2,4

Publishers are processes that write prepared commands into a socket and count the acks that come back, with ``WINDOW`` publishes
under way each, so that what they take of the machine is small beside the server. Entries have ``SIZE`` bytes, as a turn of 20
tokens has, and a header with their id, as all of ours. ``log``: one stream with a run's subjects, consumers and duplicate
window; ``plain``: so many streams without consumers, the publishers spread over them. ``server_us`` is nats-server's CPU per
entry, which other load on the machine changes least.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio
import psutil
import uvloop

from benchmarks.load_plan import temporary_server
from fleetbus.bus.nats import connect
from fleetbus.bus.streams import RunPlan, StreamPlan, plan_run
from fleetbus_schemas import Subjects

SIZE = 700
WINDOW = 256
BATCH = 64
RUN = "rate"


def publish(url: str, subject: str, count: int, key: str) -> None:
    """``count`` entries on subjects below ``subject``; a line once connected, another when all are acked."""
    host, port = url.removeprefix("nats://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\nSUB a.%s 1\r\nPING\r\n' % key.encode()
        )
        while b"PONG" not in (received := connection.recv(1 << 16)):
            if not received:
                sys.exit("the server is gone")
        print("ready", flush=True)
        sys.stdin.readline()
        sent = acked = 0
        rest = b""
        while acked < count:
            while sent < count and sent - acked <= WINDOW - BATCH:
                batch = range(sent, min(sent + BATCH, count))
                connection.sendall(b"".join(encode(subject, key, number) for number in batch))
                sent += len(batch)
            received = connection.recv(1 << 16)
            rest += received
            if not received or b'"error"' in rest:
                sys.exit(f"refused, or the server is gone: {rest[-500:]!r}")
            acked += rest.count(b"MSG a.")
            rest = rest[-5:]  # less than what is counted
    print("done", flush=True)


def encode(subject: str, key: str, number: int) -> bytes:
    """One HPUB with the id of the message, as `fleetbus.bus.nats` writes it."""
    header = f"NATS/1.0\r\nNats-Msg-Id: {key}-{number:09d}\r\n\r\n".encode()
    command = f"HPUB {subject}{number % 997}{key} a.{key} {len(header)} {len(header) + SIZE}\r\n".encode()
    return command + header + b"x" * SIZE + b"\r\n"


def build_plans(what: str, streams: int) -> list[tuple[RunPlan, str]]:
    """Each stream, and the subjects to publish on."""
    if what == "log":
        return [(plan_run(RUN, lanes=16, max_bytes=1 << 30), Subjects(RUN).action("e0", "e"))]
    plans = []
    for index in range(streams):
        log = StreamPlan(name=f"plain{index}", subjects=(f"plain{index}.>",), max_bytes=1 << 30)
        lanes = StreamPlan(name=f"beside{index}", subjects=(f"beside{index}.>",))
        plans.append((RunPlan(run=f"r{index}", log=log, lanes=lanes, consumers=()), f"plain{index}."))
    return plans


async def measure(what: str, streams: int, publishers: int, count: int) -> dict[str, float | str]:
    async with temporary_server() as url:
        plans = build_plans(what, streams)
        for plan, _ in plans:
            async with connect(url, run=plan.run, role="init") as bus:
                await bus.declare(plan)
        (server,) = (child for child in psutil.Process().children() if "nats-server" in child.name())
        with ExitStack() as stack:
            processes = []
            for index in range(publishers):
                subject = plans[index % len(plans)][1]
                command = [sys.executable, __file__, "--publish", subject, "--url", url, "--key", f"p{index}"]
                process = subprocess.Popen(
                    [*command, "--count", str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
                processes.append(process)

            def expect(word: str) -> None:
                for process in processes:
                    assert process.stdout is not None
                    if process.stdout.readline().strip() != word:
                        raise SystemExit("a publisher failed")

            await anyio.to_thread.run_sync(expect, "ready")
            cpu, started = sum(server.cpu_times()[:2]), time.perf_counter()
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            await anyio.to_thread.run_sync(expect, "done")
            wall = time.perf_counter() - started
            used = sum(server.cpu_times()[:2]) - cpu
    entries = publishers * count
    return {"case": what, "streams": streams, "publishers": publishers, "entries_per_second": round(entries / wall),
            "server_us": round(used / entries * 1e6, 1), "server_cores": round(used / wall, 2)}  # fmt: skip


async def main(streams: list[int], publishers: int, count: int, rounds: int, as_json: bool) -> None:
    cases = [("log", 1), *(("plain", each) for each in streams)]
    found: dict[tuple[str, int], list[dict[str, float | str]]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            found[case].append(await measure(*case, publishers, count))
    for case in cases:
        row = sorted(found[case], key=lambda each: each["entries_per_second"])[rounds // 2]
        print(json.dumps(row) if as_json else "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,2,4", help="numbers of plain streams")
    parser.add_argument("--publishers", type=int, default=4, help="connections, each a process")
    parser.add_argument("--count", type=int, default=50_000, help="entries of each")
    parser.add_argument("--rounds", type=int, default=5, help="of each the one with the median rate is printed")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    for hidden in ("--publish", "--url", "--key"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.publish:
        publish(options.url, options.publish, options.count, options.key)
    else:
        streams = [int(each) for each in options.streams.split(",")]
        uvloop.run(main(streams, options.publishers, options.count, options.rounds, options.json))
