"""Tries of a grader: the cases, what grades them, and the run over all of them."""
