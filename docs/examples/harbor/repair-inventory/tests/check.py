"""Runs each case in a process of its own and compares what it prints here: code of the agent cannot end this one early."""

import json
import subprocess
import sys

BEGIN = "import json, sys\nsys.path.insert(0, '/app')\nfrom inventory.records import Record, parse_line\n"
STOCK = "from inventory.stock import Stock\nfrom inventory.report import total_value\n"
CASES = [
    ("print(json.dumps(parse_line('apple; 3; 0.25')))", ["apple", 3, 0.25]),
    ("print(json.dumps(parse_line('  pear ;10;  1.5 ')))", ["pear", 10, 1.5]),
    ("try: parse_line('fig; -1; 2')\nexcept ValueError: print(json.dumps('refused'))", "refused"),
    (
        STOCK + "s = Stock([Record('a', 3, 1.0)])\ns.remove('a', 2)\nprint(json.dumps(s.records['a'].count))",
        1,
    ),
    (
        STOCK + "s = Stock([Record('a', 3, 1.0)])\ntry: s.remove('a', 4)\n"
        "except ValueError: print(json.dumps(s.records['a'].count))",
        3,
    ),
    (STOCK + "s = Stock([])\ntry: s.remove('a', 1)\nexcept KeyError: print(json.dumps(len(s.records)))", 0),
    (STOCK + "print(json.dumps(total_value(Stock([Record('a', 3, 0.25), Record('b', 7, 0.17)]))))", 1.94),
    (STOCK + "print(json.dumps(total_value(Stock([Record('a', 1, 0.004), Record('b', 1, 0.004)]))))", 0.01),
]

passed = 0
for code, expected in CASES:
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=20)
    try:
        passed += json.loads(done.stdout) == expected
    except ValueError:
        print(done.stderr[-300:])
print(f"{passed} of {len(CASES)} cases")
with open("/logs/verifier/reward.txt", "w") as file:
    file.write("1" if passed == len(CASES) else "0")
