"""The unpacked wheel of nemo-gym, which `just test-foreign` puts in place; NEMO_GYM_WHEEL names another one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[2] / "build"
WHEEL = Path(os.environ.get("NEMO_GYM_WHEEL", str(BUILD / "nemo_gym")))

needs_wheel = pytest.mark.skipif(not WHEEL.is_dir(), reason=f"no unpacked wheel of nemo-gym at {WHEEL}: `just test-foreign`")
