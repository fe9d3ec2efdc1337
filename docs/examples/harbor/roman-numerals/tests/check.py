"""Asks the agent's function in a process of its own, and compares here, where that code has nothing."""

import json
import subprocess
import sys

CASES = {
    1: "I",
    4: "IV",
    9: "IX",
    14: "XIV",
    40: "XL",
    90: "XC",
    444: "CDXLIV",
    1994: "MCMXCIV",
    2026: "MMXXVI",
    3999: "MMMCMXCIX",
}
ASK = "import json, sys\nsys.path.insert(0, '/app')\nfrom roman import to_roman\n"
NUMBERS = f"print(json.dumps([to_roman(n) for n in {list(CASES)}]))"
REFUSALS = "\n".join(f"try: to_roman({n})\nexcept ValueError: print('refused')" for n in (0, 4000, -3))


def ask(code):
    return subprocess.run([sys.executable, "-c", ASK + code], capture_output=True, text=True, timeout=20).stdout


try:
    right = json.loads(ask(NUMBERS)) == list(CASES.values()) and ask(REFUSALS).split() == ["refused"] * 3
except ValueError:
    right = False
with open("/logs/verifier/reward.json", "w") as file:
    json.dump({"reward": 1.0 if right else 0.0}, file)
