"""The table of rights in docs/accounts.md is what the table of channels gives, and gives nothing away by mistake."""

from __future__ import annotations

from pathlib import Path

from fleetbus.auth.permissions import build_rights
from fleetbus.bus.streams import plan_run
from fleetbus_schemas.channels import ROLES
from tests.support.auth_operations import is_allowed, operations, table

OPERATIONS = operations("default")
PLAN = plan_run("default")


def test_there_are_58_operations_and_docs_say_who_may_do_them() -> None:
    assert len(OPERATIONS) == len({operation.subject for operation in OPERATIONS}) == 58
    page = (Path(__file__).parents[2] / "docs" / "accounts.md").read_text()
    assert table() in page, "replace the table in docs/accounts.md: python -m tests.support.auth_operations"


def test_every_operation_is_somebodys_or_only_the_admins() -> None:
    allowed = {
        operation.name: [user for user in ROLES if is_allowed(build_rights(user, PLAN), operation)] for operation in OPERATIONS
    }
    nobodys = [name for name, users in allowed.items() if not users]
    assert nobodys == ["write into another run"]
