#!/bin/bash
awk '$2 == "ERROR"' /tests/service.log > /tmp/expected
if cmp -s /tmp/expected /app/errors.log; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
