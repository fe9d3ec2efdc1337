"""The server's configuration: of the same size for any number of lanes, linear in runs, and as narrow as the rights say."""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath
from typing import Any

import pytest

from fleetbus.auth.consumer_names import COUNTED, reader_names, secret_names
from fleetbus.auth.permissions import build_rights
from fleetbus.auth.server_config import RunAccess, account_of, parse_runs, run_accounts, server_config
from fleetbus.auth.shared_values import format_sharing
from fleetbus.bus.streams import plan_run
from fleetbus_schemas.channels import ROLES
from tests.support.auth_operations import covers

RUN_BYTES = 15_800
"""Of one run with one pool and one policy; 5 KB of it are the names that a monitor and the recorder read under, each of its
own key."""

SECRET_BYTES = 1 << 20
"""Most that a Secret of Kubernetes holds."""


def allow(run: str, lanes: int = 16, pools: tuple[str, ...] = ("default",)) -> RunAccess:
    plan = plan_run(run, lanes=lanes, pools=pools)
    readers = {user: reader_names(run, user, user.encode() * 6) for user in COUNTED}
    keys = {user: "U" + user.upper().ljust(55, "A") for user in ROLES}
    return RunAccess(plan=plan, names=secret_names(plan, b"a" * 58), readers=readers, public_keys=keys)


def measure(runs: int, lanes: int) -> int:
    accounts = [allow(f"default{number or ''}", lanes) for number in range(runs)]
    return len(server_config(accounts, PurePosixPath("/auth")))


@pytest.mark.parametrize("lanes", [16, 256, 1024, 4096])
def test_a_run_takes_the_same_room_however_many_lanes_it_has(lanes: int) -> None:
    assert measure(1, lanes) < RUN_BYTES
    assert measure(1, lanes) - measure(1, 16) <= 8, "digits of the limit of connections"


@pytest.mark.parametrize("runs", [6, 20])
def test_each_further_run_takes_no_more_than_the_first(runs: int) -> None:
    assert measure(runs, 64) / runs < measure(1, 64) < RUN_BYTES
    assert 66 * measure(1, 64) < SECRET_BYTES


def test_a_pool_costs_nothing() -> None:
    assert run_accounts(allow("r", pools=("default", "gpu", "browser"))) == run_accounts(allow("r"))


def test_no_name_of_a_consumer_that_a_role_works_from_stands_in_it() -> None:
    access = allow("r")
    text = run_accounts(access)
    assert [plain for plain, name in access.names.items() if name in text] == ["obs_default_any"]


def read_accounts(text: str) -> dict[str, Any]:
    """The accounts as the server reads them: each variable replaced by what it stands for."""
    values: dict[str, Any] = {}
    for line in text.splitlines():
        key, value = re.fullmatch(r'("[^"]*"|\w+):(.*)', line).groups()  # type: ignore[union-attr]
        quoted = re.sub(r"([{,])(\w+):", r'\1"\2":', value)
        whole = re.sub(r"\$([A-Z][0-9a-z]*)(?=[],}])", lambda found: json.dumps(values[found[1]]), quoted)
        values[key.strip('"')] = json.loads(whole)
    return {name: value for name, value in values.items() if name.startswith("fb_")}


def test_every_account_imports_and_may_publish_exactly_its_rights() -> None:
    access = allow("r")
    accounts = read_accounts(run_accounts(access))
    for user in ROLES:
        rights = build_rights(user, access.plan, access.names, access.readers.get(user, ()), access.public_keys[user])
        account = accounts[account_of("r", user)]
        asked = [each for each in account.get("imports", []) if each.get("service", {}).get("account") == "fb_r"]
        assert [(each["service"]["subject"], each.get("to", "")) for each in asked] == [
            (need.target or need.subject, need.subject if need.target else "") for need in rights.asks
        ]
        if user != "admin":
            assert account["users"][0]["permissions"]["publish"]["allow"][1:] == list(rights.publish)
            assert account["users"][0]["permissions"]["subscribe"]["allow"][1:] == list(rights.subscribe)


def test_every_import_is_a_part_of_one_export_or_spelled_as_one() -> None:
    """Which of several exports the server would take is not said: they differ in how long it waits for an answer."""
    accounts = read_accounts(run_accounts(allow("r")))
    offered = {each["service"]: each for each in accounts["fb_r"]["exports"]}
    assert len(offered) == len(accounts["fb_r"]["exports"])
    for account, found in accounts.items():
        for each in found.get("imports", []):
            subject = each.get("service", {}).get("subject", "")
            if each.get("service", {}).get("account") == "fb_r":
                parts = [export for export in offered if covers(export, subject)]
                assert subject in offered or len(parts) == 1, (account, subject, parts)


def test_runs_are_found_in_a_configuration_of_now_and_of_before() -> None:
    assert parse_runs(server_config([allow("a"), allow("b-2")], PurePosixPath("/auth"))) == ["a", "b-2"]
    assert parse_runs('accounts {\n  "fb_a": {\n    limits: {}\n  "fb_a@learner": {\n') == ["a"]


def test_what_comes_up_again_stands_once_and_what_is_short_stands_where_it_is_used() -> None:
    long = {"service": {"account": "an-account-with-a-long-name", "subject": "a.subject.with.many.tokens"}}
    lines = format_sharing({"a": {"imports": [long, "x"]}, "b": {"imports": [long, "x"]}})
    assert lines[-2:] == ['"a":{imports:$A}', '"b":{imports:$A}']
    assert sum(line.count("an-account-with-a-long-name") for line in lines) == 1
    assert format_sharing({"a": ["x", "x"]}) == ['"a":["x","x"]']
