"""A log that was begun with keys and one without are in different accounts: neither is taken for a new run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetbus.auth.stores import check_store, find_account
from fleetbus.errors import UserError
from tests.support.auth_operations import covers


def test_a_run_goes_on_as_it_was_begun(tmp_path: Path) -> None:
    for keys in (True, False):
        check_store(tmp_path, "a", keys=keys)
    (tmp_path / "jetstream" / "$G" / "streams" / "fb_a").mkdir(parents=True)
    check_store(tmp_path, "a", keys=False)
    with pytest.raises(UserError, match="run a was begun without keys: leave out --nats-auth"):
        check_store(tmp_path, "a", keys=True)
    (tmp_path / "jetstream" / "fb_b" / "streams" / "fb_b").mkdir(parents=True)
    check_store(tmp_path, "b", keys=True)
    with pytest.raises(UserError, match="run b was begun with keys: give --nats-auth again"):
        check_store(tmp_path, "b", keys=False)


def test_a_folder_with_the_log_of_another_run_alone_is_not_gone_on_with(tmp_path: Path) -> None:
    store = tmp_path / "copy" / "nats"
    for stream in ("fb_origin", "fblane_origin"):
        (store / "jetstream" / "$G" / "streams" / stream).mkdir(parents=True)
    for keys in (True, False):
        with pytest.raises(
            UserError, match=r"copy holds the log of run origin: rename it back .*fleetbus fork copy --run NAME"
        ):
            check_store(store, "copy", keys=keys)
    check_store(store, "origin", keys=False)
    (store / "jetstream" / "$G" / "streams" / "fb_copy").mkdir()
    check_store(store, "copy", keys=False)


def test_a_log_of_keys_is_in_the_account_of_its_run(tmp_path: Path) -> None:
    assert find_account(tmp_path, "b") == ""
    (tmp_path / "jetstream" / "fb_b" / "streams" / "fb_b").mkdir(parents=True)
    assert find_account(tmp_path, "b") == "fb_b"


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.*.c", "a.b.c", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.*", "a.>", False),
        ("a.>", "a.>", True),
        ("a.b", "a.*", False),
        ("a.*", "a.*", True),
        ("a.b.c", "a.b", False),
        ("a.b", "a.b.c", False),
    ],
)
def test_a_pattern_covers_what_it_names_and_no_more(pattern: str, subject: str, expected: bool) -> None:
    assert covers(pattern, subject) is expected
