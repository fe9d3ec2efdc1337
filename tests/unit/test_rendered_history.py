"""Agreement of a prompt that the template rendered anew with what was sampled, and the reason where it ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetbus_schemas import ChatMessage
from fleetbus_workers.inference.rendered_history import count_shared, find_reason

ids = st.lists(st.integers(0, 3), max_size=12)


@given(history=ids, rendered=ids)
def test_what_is_shared_is_the_longest_common_beginning(history: list[int], rendered: list[int]) -> None:
    shared = count_shared(history, rendered)
    assert history[:shared] == rendered[:shared]
    assert shared in (len(history), len(rendered)) or history[shared] != rendered[shared]


def test_the_reason_is_reasoning_only_where_some_is_missing() -> None:
    conversation = [
        ChatMessage(role="user", content="Which?"),
        ChatMessage(role="assistant", content="<think>\nred or blue\n</think>\n\nred"),
    ]
    marks = ("<think>", "</think>")
    assert find_reason(conversation, "Which? red", marks) == "reasoning_dropped"
    assert find_reason(conversation, "Which? <think>\nred or blue\n</think>\n\n red", marks) == "history_edited"
    assert find_reason(conversation, "Which? red", None) == "history_edited"
