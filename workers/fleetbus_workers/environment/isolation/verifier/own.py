"""The verifiers that ship with fleetbus: where nothing isolates, no others run unless the operator permits them."""

import re

WAREHOUSE = '''\
async def verify(env, final_answer):
    """1 if the answer is exactly the value that stands in the warehouse."""
    row = await env.query("SELECT {field} FROM items WHERE name = ?", ["{name}"])
    return 1.0 if (final_answer or "").strip() == str(row[0][0]) else 0.0
'''
_FILLED = re.compile(re.escape(WAREHOUSE).replace(r"\{field\}", "[a-z]{1,20}").replace(r"\{name\}", "[A-Za-z0-9 -]{1,60}"))


def is_own_verifier(code: str) -> bool:
    """True if ``code`` is a verifier of fleetbus itself, names filled in, and nothing besides."""
    return _FILLED.fullmatch(code) is not None
