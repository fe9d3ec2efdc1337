"""The token history of an episode: what of several attempts' Actions is trained, and its hash."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbus.core.episode.history import Turn, collect_images, collect_token_ids, fold_history, loss_mask
from fleetbus_schemas import Action, ActionReference, AttemptStarted, ShownImage
from fleetbus_schemas.tokens import EMPTY_HISTORY, extend_history, pack_ids
from tests.support.histories import history_hash


def claim(attempt: int, resumed_at: int = 0) -> AttemptStarted:
    return AttemptStarted(
        episode_id="e", attempt=attempt, worker="w", nonce=f"n{attempt}", lane=f"e{attempt}", resumed_at_turn=resumed_at
    )


def turn(
    attempt: int,
    number: int,
    *,
    sampled: tuple[int, ...] = (7, 8),
    sequence: int = 0,
    delta: tuple[int, ...] = (1,),
    images: tuple[ShownImage, ...] = (),
) -> Turn:
    action = Action(
        episode_id="e",
        attempt=attempt,
        turn=number,
        text=f"{attempt}/{number}",
        prompt_delta=pack_ids(delta),
        sampled=pack_ids(sampled),
        finish_reason="stop" if sampled else "failed",
        images=images,
    )
    return Turn(sequence=sequence or 100 * attempt + number, lane=f"e{attempt}", action=action)


def names(turns: tuple[Turn, ...]) -> list[str]:
    return [each.action.text for each in turns]


def test_one_attempt_is_its_actions_in_turn_order() -> None:
    assert names(fold_history([claim(1)], [turn(1, 1), turn(1, 0), turn(1, 2)])) == ["1/0", "1/1", "1/2"]


def test_an_episode_without_claims_has_no_history() -> None:
    assert fold_history([], [turn(1, 0)]) == ()


def test_a_takeover_from_the_beginning_forgets_what_came_before() -> None:
    history = fold_history([claim(1), claim(2)], [turn(1, 0), turn(1, 1), turn(2, 0)])
    assert names(history) == ["2/0"]


def test_a_resumed_attempt_stands_on_the_turns_before_it() -> None:
    history = fold_history([claim(1), claim(2, 2)], [turn(1, 0), turn(1, 1), turn(2, 2), turn(2, 3)])
    assert names(history) == ["1/0", "1/1", "2/2", "2/3"]


def test_a_resumed_attempt_cuts_what_its_forerunner_did_afterwards() -> None:
    """A paused worker goes on for a while after it was replaced: those Actions are nobody's."""
    history = fold_history([claim(1), claim(2, 1)], [turn(1, 0), turn(1, 1), turn(1, 2), turn(2, 1)])
    assert names(history) == ["1/0", "2/1"]


def test_three_attempts_are_cut_and_resumed_one_after_another() -> None:
    actions = [turn(1, 0), turn(1, 1), turn(1, 2), turn(2, 2), turn(2, 3), turn(3, 1)]
    assert names(fold_history([claim(1), claim(2, 2)], actions)) == ["1/0", "1/1", "2/2", "2/3"]
    assert names(fold_history([claim(1), claim(2, 2), claim(3, 1)], actions)) == ["1/0", "3/1"]


def test_a_gap_ends_the_history() -> None:
    assert names(fold_history([claim(1)], [turn(1, 0), turn(1, 2)])) == ["1/0"]


def test_an_attempt_that_resumed_beyond_the_log_adds_nothing() -> None:
    """It stood on a turn that is gone: what it did afterwards has nothing to follow."""
    assert names(fold_history([claim(1), claim(2, 3)], [turn(1, 0), turn(2, 3)])) == ["1/0"]


def test_actions_without_tokens_are_no_part_of_a_history() -> None:
    assert names(fold_history([claim(1)], [turn(1, 0), turn(1, 1, sampled=()), turn(1, 2)])) == ["1/0"]


def test_an_answer_after_a_failed_action_of_the_same_turn_counts() -> None:
    assert names(fold_history([claim(1)], [turn(1, 0, sampled=()), turn(1, 0)])) == ["1/0"]


def test_of_two_actions_of_one_turn_the_first_in_the_log_counts() -> None:
    history = fold_history([claim(1)], [turn(1, 0, sequence=5), turn(1, 0, sampled=(9,), sequence=6)])
    assert [each.reference for each in history] == [ActionReference(sequence=5, lane="e1", turn=0)]


def test_actions_of_unknown_attempts_are_left_out() -> None:
    assert names(fold_history([claim(1)], [turn(2, 0), turn(1, 0)])) == ["1/0"]


def test_ids_and_mask_alternate_between_prompt_and_sampled() -> None:
    history = [turn(1, 0, delta=(1, 2), sampled=(3,)), turn(1, 1, delta=(4,), sampled=(5, 6))]
    assert collect_token_ids(history) == [1, 2, 3, 4, 5, 6]
    assert loss_mask(history) == [False, False, True, False, True, True]


def test_images_of_later_turns_stand_where_their_tokens_stand_in_the_whole_history() -> None:
    first, second = (ShownImage(object=name * 64, start=1, stop=3) for name in "ab")
    history = [turn(1, 0, delta=(1, 2, 2), sampled=(3,), images=(first,)), turn(1, 1, delta=(4, 2, 2), images=(second,))]
    assert collect_images(history) == [first, ShownImage(object="b" * 64, start=5, stop=7)]


def test_two_histories_of_the_same_ids_and_other_images_differ_in_their_hash() -> None:
    shown = [turn(1, 0, images=(ShownImage(object=name * 64, start=0, stop=1),)) for name in "ab"]
    assert len({history_hash([turn(1, 0)]), *(history_hash([each]) for each in shown)}) == 3


def test_the_hash_of_nothing_is_the_empty_history() -> None:
    assert history_hash([]) == EMPTY_HISTORY


ids = st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple)
played = st.lists(st.tuples(ids, ids.filter(bool)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=50)
@given(played)
def test_the_hash_carried_from_turn_to_turn_is_the_hash_rebuilt_from_the_log(
    tokens: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    carried = EMPTY_HISTORY
    turns = []
    for number, (delta, sampled) in enumerate(tokens):
        carried = extend_history(carried, pack_ids(delta), pack_ids(sampled))
        turns.append(turn(1, number, delta=delta, sampled=sampled))
    rebuilt = fold_history([claim(1)], reversed(turns))
    assert history_hash(rebuilt) == carried
    assert collect_token_ids(rebuilt) == [one for delta, sampled in tokens for one in (*delta, *sampled)]
    assert loss_mask(rebuilt) == [flag for delta, sampled in tokens for flag in [False] * len(delta) + [True] * len(sampled)]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=5))
def test_the_fold_equals_cutting_and_appending_by_hand(attempts: list[tuple[int, int]]) -> None:
    """Each attempt resumes somewhere within the history before it and plays some turns of its own."""
    by_hand: list[str] = []
    claims, actions = [], []
    for attempt, (wanted, count) in enumerate(attempts, start=1):
        resumed = min(wanted, len(by_hand))
        claims.append(claim(attempt, resumed))
        own = [turn(attempt, number) for number in range(resumed, resumed + count)]
        by_hand = by_hand[:resumed] + names(tuple(own))
        actions += own
    assert names(fold_history(claims, actions)) == by_hand


@settings(deadline=None, max_examples=50)
@given(played, st.integers(0, 5), st.integers(0, 3))
def test_any_other_token_gives_another_hash(
    tokens: list[tuple[tuple[int, ...], tuple[int, ...]]], place: int, offset: int
) -> None:
    number = place % len(tokens)
    delta, sampled = tokens[number]
    changed = list(sampled)
    changed[offset % len(changed)] ^= 1
    turns = [turn(1, index, delta=one, sampled=two) for index, (one, two) in enumerate(tokens)]
    others = list(turns)
    others[number] = turn(1, number, delta=delta, sampled=tuple(changed))
    assert history_hash(turns) != history_hash(others)
