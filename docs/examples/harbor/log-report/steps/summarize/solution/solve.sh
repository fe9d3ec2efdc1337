#!/bin/bash
python3 - <<'PY'
import collections, json
parts = collections.Counter(line.split()[2] for line in open("/app/errors.log"))
json.dump(parts, open("/app/report.json", "w"))
PY
