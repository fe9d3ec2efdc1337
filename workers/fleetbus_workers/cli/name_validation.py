"""Names that users give and that become tokens of subjects."""

from __future__ import annotations


def validate_name(kind: str, name: str) -> str:
    """``name`` unchanged if it can be a token of a subject; raises `UserError` that names ``kind``."""
    from fleetbus.errors import UserError
    from fleetbus_schemas.subjects import InvalidName, check_name

    try:
        return check_name(kind, name)
    except InvalidName as error:
        raise UserError(str(error)) from error
