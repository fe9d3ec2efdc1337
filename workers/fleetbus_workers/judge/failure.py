"""The exception of a judge; apart from the client, so that nobody imports httpx to catch it."""


class JudgeFailed(Exception):
    """There is no score; the message says why, in one line without secrets."""
