"""The learner's decisions: ledger, lineage, floor, retention, groups and capacity."""
