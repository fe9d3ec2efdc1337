"""Counts the groups that may be admitted, so that what is trained is never staler than allowed. Pure.

The rule of fully asynchronous trainers: groups admitted in total stay within ``(max_staleness + step + 1) * batch``, where
``step`` counts finished batches. A group admitted now is then consumed at most ``max_staleness`` versions later.
"""


def count_admissible_groups(*, step: int, last_step: int, batch: int, max_staleness: int, outstanding: int) -> int:
    """Groups that may be admitted now; ``outstanding`` are admitted and neither trained nor discarded yet.

    Nothing is admitted beyond what the last step needs.
    """
    batches_ahead = min(1 + max_staleness, last_step - step)
    return max(0, batches_ahead * batch - outstanding)


def lag(step: int, sampled_at: tuple[int, ...]) -> int:
    """Optimizer steps between the oldest sampled token and the weights after ``step`` steps.

    Steps, not version numbers: after a resume the numbers continue while the steps go back. 0 without tokens, and for tokens of
    a lineage that was cut ahead of ``step``.
    """
    return max(0, step - min(sampled_at, default=step))
