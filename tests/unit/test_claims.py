"""The fold of ``episode.<episode>``: who holds an episode, how often it was lost with its worker, how it ended."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbus.core.episode.claims import EpisodeEntry, EpisodeState, fold_episode
from fleetbus_schemas import AttemptReleased, AttemptStarted, EpisodeFinished


def claim(attempt: int, *, nonce: str = "", worker: str = "a") -> AttemptStarted:
    return AttemptStarted(episode_id="e", attempt=attempt, worker=worker, nonce=nonce or f"n{attempt}", lane="e0")


def release(attempt: int) -> AttemptReleased:
    return AttemptReleased(episode_id="e", attempt=attempt, worker="a")


def result(attempt: int, reward: float = 1.0) -> EpisodeFinished:
    return EpisodeFinished(episode_id="e", group_id="g", attempt=attempt, outcome="completed", worker="a", reward=reward)


def standing_after(*entries: EpisodeEntry | None) -> EpisodeState:
    """Entries at sequences 10, 20, 30, ..."""
    return fold_episode((10 * (index + 1), entry) for index, entry in enumerate(entries))


def test_an_episode_without_entries_is_fresh() -> None:
    episode_state = standing_after()
    assert (episode_state.last_sequence, episode_state.attempts, episode_state.newest) == (0, 0, None)
    assert episode_state.next_reason == "fresh"
    assert not episode_state.is_held_by("n1")
    assert not episode_state.is_poison(1)


def test_the_newest_claim_holds_the_episode_and_fences_the_older_one() -> None:
    episode_state = standing_after(claim(1), claim(2, worker="b"))
    assert episode_state.newest == claim(2, worker="b")
    assert episode_state.is_held_by("n2")
    assert not episode_state.is_held_by("n1")
    assert (episode_state.claim_sequence, episode_state.last_sequence) == (20, 20)
    assert episode_state.next_reason == "taken_over"


def test_a_release_gives_the_episode_back_without_counting_as_a_loss() -> None:
    episode_state = standing_after(claim(1), release(1))
    assert not episode_state.is_held_by("n1")
    assert episode_state.next_reason == "handed_back"
    assert (episode_state.losses, episode_state.last_sequence, episode_state.claim_sequence) == (0, 20, 10)


def test_a_claim_after_a_release_is_held_again() -> None:
    episode_state = standing_after(claim(1), release(1), claim(2))
    assert episode_state.is_held_by("n2")
    assert episode_state.losses == 1
    assert episode_state.next_reason == "taken_over"


def test_an_episode_that_was_lost_three_times_is_poison() -> None:
    assert not standing_after(claim(1), claim(2)).is_poison(3)
    assert standing_after(claim(1), claim(2), claim(3)).is_poison(3)


def test_an_episode_has_its_last_chance_when_one_more_loss_would_make_it_poison() -> None:
    chances = [standing_after(*(claim(attempt + 1) for attempt in range(losses))).is_on_last_attempt(3) for losses in range(4)]
    assert chances == [False, False, True, False]
    assert not standing_after().is_on_last_attempt(1)
    assert not standing_after(claim(1), claim(2), release(2)).is_on_last_attempt(3)
    assert not standing_after(claim(1), claim(2), result(2)).is_on_last_attempt(3)


def test_hand_backs_never_make_an_episode_poison() -> None:
    entries = [entry for attempt in range(1, 11) for entry in (claim(attempt), release(attempt))]
    assert not standing_after(*entries).is_poison(1)


def test_hand_backs_between_losses_do_not_reset_the_count() -> None:
    episode_state = standing_after(claim(1), claim(2), release(2), claim(3), claim(4))
    assert episode_state.losses == 3
    assert episode_state.is_poison(3)


def test_the_first_result_is_final() -> None:
    episode_state = standing_after(claim(1), result(1, 1.0), claim(2), result(2, 0.0), release(2))
    assert episode_state.result == result(1, 1.0)
    assert episode_state.last_sequence == 20
    assert episode_state.attempts == 1


def test_a_finished_episode_is_held_by_nobody_and_never_poison() -> None:
    episode_state = standing_after(claim(1), claim(2), claim(3), result(3))
    assert not episode_state.is_held_by("n3")
    assert not episode_state.is_poison(1)


def test_a_result_without_any_claim_ends_the_episode() -> None:
    episode_state = standing_after(result(0))
    assert episode_state.result == result(0)
    assert episode_state.attempts == 0


def test_an_unreadable_entry_says_nothing_but_is_what_the_next_one_expects() -> None:
    episode_state = standing_after(claim(1), None)
    assert episode_state.last_sequence == 20
    assert episode_state.claim_sequence == 10
    assert episode_state.is_held_by("n1")


def naive(kinds: list[str]) -> tuple[int, bool, bool]:
    """Losses, whether the newest claim holds, whether it is over: written as one would say it aloud."""
    claims = losses = 0
    held = over = False
    for kind in kinds:
        if over:
            continue
        if kind == "claim":
            claims, held = claims + 1, True
            losses += 1
        elif kind == "release" and held:
            held = False
            losses -= 1
        elif kind == "result":
            held, over = False, True
    return losses, held, over


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from(["claim", "release", "result"]), max_size=12))
def test_the_fold_agrees_with_a_naive_reading(kinds: list[str]) -> None:
    entries: list[EpisodeEntry] = []
    attempt, held, kept = 0, False, []
    for kind in kinds:
        if kind == "release" and not held:
            continue  # a release expects its own claim's sequence, so the server stores no other one
        kept.append(kind)
        attempt += kind == "claim"
        held = kind == "claim"
        entries.append(claim(attempt) if kind == "claim" else release(attempt) if kind == "release" else result(attempt))
    episode_state = standing_after(*entries)
    assert (
        episode_state.losses,
        episode_state.is_held_by(f"n{episode_state.attempts}"),
        episode_state.result is not None,
    ) == naive(kept)
