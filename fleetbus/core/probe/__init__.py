"""Tries of a grader: answers that are known to be right or wrong, and what its rewards for them show. Pure."""
