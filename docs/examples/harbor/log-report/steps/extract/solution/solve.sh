#!/bin/bash
awk '$2 == "ERROR"' /app/service.log > /app/errors.log
