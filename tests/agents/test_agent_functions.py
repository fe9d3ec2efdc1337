"""A function that is an agent: its module, the values that it returns, and the rewards that are posted for them."""

from __future__ import annotations

import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetbus_workers.environment.adapters.agent import run_function
from fleetbus_workers.environment.adapters.agent.run_function import build_body, import_agent


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.bool_(False), 0.0),
        (np.float32(0.5), 0.5),
        (Decimal("0.5"), 0.5),
        ({"reward": np.True_}, 1.0),
        ({"reward": None, "reason": "the shop was closed"}, None),
        ({"reward": 0, "seats": {"first": np.float64(1), "second": None}}, 0.0),
    ],
)
def test_a_number_of_any_type_is_a_reward(returned: Any, reward: float | None) -> None:
    posted = json.loads(json.dumps(build_body(returned)))
    assert posted["reward"] == reward


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ("1.0", "not text"),
        (float("nan"), "finite"),
        ((1.0, "good"), "tuple"),
        ({"score": 1.0}, "'score' is none of reward, reason, seats"),
        ({"reward": 1.0, "score": 1.0, 2: 1.0}, "2 is none of reward, reason, seats"),
        ({"reason": "good"}, "it lacks 'reward'"),
        ({"reward": 1.0, "seats": [1.0]}, "list"),
    ],
)
def test_what_holds_no_reward_is_shown_as_it_was_returned(returned: Any, named: str) -> None:
    with pytest.raises(TypeError) as caught:
        build_body(returned)
    assert f"returned {returned!r}" in str(caught.value) and named in str(caught.value)


def test_a_module_beside_the_agents_that_is_not_seen_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lonely_agent.py").write_text("import helper_that_is_not_seen")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"'helper_that_is_not_seen': .* environment\.agent_files"):
        import_agent("lonely_agent")


def test_a_module_that_the_function_itself_imports_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_agent.py").write_text("def run(task):\n    import helper_that_is_not_seen")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FLEETBUS_TASK_FILE", str(tmp_path / "task.json"))
    monkeypatch.setattr(run_function, "take_task", lambda file: {})
    monkeypatch.setattr(sys, "argv", ["run_function", "late_agent:run", str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match=r"'helper_that_is_not_seen': .* environment\.agent_files"):
        run_function.main()
