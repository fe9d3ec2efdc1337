"""A whole episode by means of fleet-python itself, run by the interpreter that has it: what it saw, as JSON.

Knows nothing of this project. ``FLEET_BASE_URL`` and ``FLEET_API_KEY`` say where and as whom.
"""

from __future__ import annotations

import json
import sys
import warnings

warnings.simplefilter("ignore")

from fleet import Fleet  # noqa: E402
from fleet.tasks import Task  # noqa: E402

VERIFIER = """
def verify(env, final_answer=None):
    print("App shop: 1")
    rows = env.query("SELECT ordered FROM items WHERE name = ?", ["ink"])
    return 1.0 if rows[0]["ordered"] == 1 and final_answer == "9" else 0.0
"""


def main() -> dict[str, object]:
    client = Fleet()
    env = client.make(
        "shop:1.2", data_key="small:0.4", env_variables={"A": 1}, ttl_seconds=600, run_id="sdk", heartbeat_interval=60
    )
    seen: dict[str, object] = {"version": env.version, "status": env.status, "mcp": env.mcp.url}
    seen["reset"] = env.reset(seed=3).success
    seen["heartbeat"] = env.heartbeat().success
    seen["resources"] = [resource.uri for resource in env.resources()]
    rows = env.db("current").query("SELECT name, price FROM items WHERE price > ?", [5])
    seen["rows"] = [list(row) for row in rows.rows]
    env.db("current").exec("UPDATE items SET ordered = 1 WHERE name = 'ink'")
    task = Task(key="buy", prompt="Buy ink.", env_id="shop", version="v1.2", verifier_func=VERIFIER)
    answer = task.verify_detailed(env, final_answer="9")
    seen["verdict"] = [answer.success, answer.result, answer.stdout, answer.execution_time_ms]
    seen["wrong"] = task.verify_detailed(env, final_answer="8").result
    seen["listed"] = [each.instance_id for each in client.instances(run_id="sdk")]
    seen["closed"] = env.close().status
    seen["left"] = [each.instance_id for each in client.instances(run_id="sdk")]
    client.make("shop", run_id="sdk")
    seen["ended"] = [each.status for each in client.close_all(run_id="sdk")]
    return seen


json.dump(main(), sys.stdout)
