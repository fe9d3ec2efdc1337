"""Commands that show a run or this machine."""
