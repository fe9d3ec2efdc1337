"""Our client of VAGEN's remote-gym protocol beside VAGEN's own, against a server that answers at once: what a client costs.

    VAGEN_CHECKOUT=DIR python benchmarks/gym_clients.py --json      # after `just test-clients`

Each is one process with one thread for its sessions, and has a server of its own (`null_server.py`); they take turns, so that a
slow machine slows both. VAGEN's client decodes pictures into RGBA before it returns. Ours, as environment workers use it, hands
on the file that came; ``decoded`` decodes it into RGBA as well, in threads. Figures are medians over the rounds, ``ratio`` that
of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvloop

from benchmarks.gateway_peers import SECONDS, Case, find_python, load, serve_nothing

SIZES = {"text": 0, "512x512": 512}


async def compare(what: str, size: int, sessions: int, python: str, rounds: int) -> list[dict[str, Any]]:
    clients: dict[str, tuple[str, str, dict[str, Any]]] = {
        "vagen": ("vagen", python, {}),
        "fleetbus": ("fleetbus", sys.executable, {}),
    }
    if size:
        clients["fleetbus, decoded"] = ("fleetbus", sys.executable, {"decode": True})
    played: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
    async with AsyncExitStack() as stack:
        loads = {}
        for name, (kind, interpreter, settings) in clients.items():
            url, serving = await stack.enter_async_context(serve_nothing(size))
            case = Case(name=name, kind=kind, gateway="", sessions=sessions, settings={"size": size, **settings})
            loads[name] = await stack.enter_async_context(load(case, interpreter, url, serving))
        for _ in range(rounds):
            for name, each in loads.items():
                played[name].append(await each.play(SECONDS))
    rows = []
    for name, rates in played.items():
        pairs = zip(rates, played["vagen"], strict=True)
        fields = {
            key: round(statistics.median(one[key] for one in rates), 2)
            for key in ("steps_per_second", "p50_ms", "client_cpu_us")
        }
        ratio = statistics.median(ours["steps_per_second"] / theirs["steps_per_second"] for ours, theirs in pairs)
        rows.append({"client": name, "what": what, "sessions": sessions, **fields, "ratio": round(ratio, 2)})
    return rows


async def main(rounds: int, sessions: list[int], as_json: bool) -> None:
    python = find_python("vagen")
    if python is None or "VAGEN_CHECKOUT" not in os.environ:
        raise SystemExit("run `just test-clients`; VAGEN_CHECKOUT names VAGEN's checkout")
    for what, size in SIZES.items():
        for count in sessions:
            for row in await compare(what, size, count, python, rounds):
                print(json.dumps(row) if as_json else "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sessions", default="1,32")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    uvloop.run(main(options.rounds, [int(each) for each in options.sessions.split(",")], options.json))
