#!/bin/bash
python3 - <<'PY'
import collections, json
expected = collections.Counter(line.split()[2] for line in open("/tests/service.log") if line.split()[1] == "ERROR")
try:
    found = json.load(open("/app/report.json"))
except (OSError, ValueError):
    found = None
rewards = {"reward": float(found == dict(expected)), "parts": float(len(expected))}
json.dump(rewards, open("/logs/verifier/reward.json", "w"))
PY
