"""nkeys: a user proves who it is by signing what the server sends. The seed stays in its file."""

import os
from pathlib import Path

from fleetbus.errors import UserError


def create_seed() -> bytes:
    """The seed of a new user key, as text."""
    import nkeys

    seed: bytes = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    return seed


def public_key(file: Path) -> str:
    """The public key to the seed in ``file``; raises `UserError` that does not quote it."""
    import nkeys

    try:
        pair = nkeys.from_seed(bytearray(file.read_bytes().strip()))
        public: bytes = pair.public_key
        pair.wipe()
    except OSError as error:
        raise UserError(f"cannot read the key {file}: {error.strerror}") from error
    except (nkeys.NkeysError, ValueError, IndexError) as error:
        raise UserError(f"{file} contains no nkey seed: remove it and create another with `fleetbus auth init`") from error
    return public.decode()
