"""A process that makes one call of a store for NeMo Gym and ends: method and arguments come pickled, the answer goes pickled.

Its path has nemo_gym's unpacked wheel, whose objects are pickled both ways.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from typing import Any

from fleetbus.client.nemo_gym import TokenStore, build_lineage_store


async def answer(url: str, auth: str, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    store: Any = build_lineage_store(url, auth=auth) if method == "resolve" else TokenStore(url, auth=auth)
    sys.stderr.write("ready\n")
    sys.stderr.flush()
    try:
        return await getattr(store, method)(*arguments, **options)
    except Exception as error:
        return error


async def main() -> None:
    question = await asyncio.to_thread(lambda: pickle.load(sys.stdin.buffer))
    sys.stdout.buffer.write(pickle.dumps(await answer(*question)))
    sys.stdout.buffer.flush()
    await asyncio.Event().wait()  # it is killed: whatever it would do at its end is not done


if __name__ == "__main__":
    asyncio.run(main())
