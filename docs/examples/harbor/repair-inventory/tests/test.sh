#!/bin/bash
cd /app || exit 1
python3 /tests/check.py > /logs/verifier/output.txt 2>&1
cat /logs/verifier/output.txt
