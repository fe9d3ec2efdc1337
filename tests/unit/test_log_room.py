"""The room that admitted work will still need is measured by the growth of the log."""

from __future__ import annotations

from fleetbus.delivery.log_room import MEASURED_EPISODES, LogRoom

LIMIT = 1_000_000


def measure(room: LogRoom, *, used: int, bytes_per_episode: int, episodes: int) -> int:
    room.is_short(used, LIMIT, admitted=0)
    for _ in range(episodes):
        room.record_end()
    used += bytes_per_episode * episodes
    room.is_short(used, LIMIT, admitted=0)
    return used


def test_without_a_limit_there_is_always_room() -> None:
    assert not LogRoom(0.7).is_short(10**12, 0, admitted=1000)


def test_work_waits_above_the_share_for_admission_while_any_is_on_its_way() -> None:
    room = LogRoom(0.7)
    assert not room.is_short(699_999, LIMIT, admitted=1)
    assert room.is_short(700_000, LIMIT, admitted=1)


def test_above_it_one_group_is_admitted_where_nothing_is_on_its_way_and_it_fits() -> None:
    """Nothing would ever leave a log in which a batch is half complete."""
    room = LogRoom(0.7)
    measure(room, used=480_000, bytes_per_episode=20_000, episodes=16)
    assert not room.is_short(860_000, LIMIT, admitted=0, wanted=4)
    assert room.is_short(880_000, LIMIT, admitted=0, wanted=4)


def test_what_a_log_is_known_to_hold_counts_until_an_episode_is_measured_and_then_ever_less() -> None:
    room = LogRoom(0.7)
    room.assume(10_000, episodes=100)
    assert room.bytes_per_episode == 10_000
    measure(room, used=0, bytes_per_episode=30_000, episodes=16)
    assert room.bytes_per_episode == 20_000


def test_a_log_without_episodes_says_nothing_of_their_size() -> None:
    room = LogRoom(0.7)
    room.assume(1.0, episodes=0)
    assert room.bytes_per_episode > 1.0


def test_work_waits_when_what_was_admitted_may_fill_the_log() -> None:
    room = LogRoom(0.7)
    used = measure(room, used=0, bytes_per_episode=20_000, episodes=16)
    assert room.bytes_per_episode == 20_000
    assert not room.is_short(used, LIMIT, admitted=20, wanted=4)
    assert room.is_short(used, LIMIT, admitted=28, wanted=4)


def test_a_group_larger_than_the_room_is_admitted_once_nothing_else_is_on_its_way() -> None:
    room = LogRoom(0.7)
    used = measure(room, used=0, bytes_per_episode=20_000, episodes=16)
    assert room.is_short(used, LIMIT, admitted=1, wanted=64)
    assert not room.is_short(used, LIMIT, admitted=0, wanted=64)


def test_work_waits_for_what_others_asked_for_and_may_still_store() -> None:
    room = LogRoom(0.7)
    used = measure(room, used=0, bytes_per_episode=20_000, episodes=16)
    assert not room.is_short(used, LIMIT, admitted=4, others=16, wanted=4)
    assert room.is_short(used, LIMIT, admitted=4, others=24, wanted=4)
    assert room.is_short(used, LIMIT, admitted=0, others=28, wanted=4), "they end, and then it is admitted"


def test_above_the_share_for_admission_who_has_nothing_out_is_not_held_up_by_others_as_long_as_all_of_it_fits() -> None:
    room = LogRoom(0.7)
    measure(room, used=430_000, bytes_per_episode=20_000, episodes=16)
    assert not room.is_short(750_000, LIMIT, admitted=0, others=2, wanted=3)


def test_what_was_stored_while_nothing_ended_counts_for_those_that_end_later() -> None:
    """Looked at often, the log grows by little between an episode's last look and its end."""
    room = LogRoom(0.7)
    for used in range(0, 80_001, 1_000):
        room.is_short(used, LIMIT, admitted=4)
    for _ in range(4):
        room.record_end()
    room.is_short(81_000, LIMIT, admitted=0)
    assert room.bytes_per_episode == 81_000 / 4


def test_what_was_removed_meanwhile_measures_nothing() -> None:
    room = LogRoom(0.7)
    used = measure(room, used=500_000, bytes_per_episode=20_000, episodes=4)
    room.record_end()
    room.is_short(used - 400_000, LIMIT, admitted=0)
    assert room.bytes_per_episode == 20_000


def test_newer_episodes_count_more_than_a_long_past() -> None:
    room = LogRoom(0.7)
    measure(room, used=0, bytes_per_episode=100, episodes=2 * MEASURED_EPISODES)
    for _ in range(8):
        measure(room, used=0, bytes_per_episode=500, episodes=MEASURED_EPISODES)
    assert room.bytes_per_episode > 350
