"""A judge over real HTTP, from a small scripted server: scores, failures, repetitions, and rewards of whole episodes."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from fleetbus.config.training_settings import RewardSettings
from fleetbus.errors import UserError
from fleetbus_workers.judge.client import Judge
from fleetbus_workers.judge.failure import JudgeFailed
from fleetbus_workers.judge.opening import check_judge, open_judge
from tests.support.judge_server import JudgeServer, scores, serve_judge

KEY = "sk-hidden-from-all"


def build_judge(server: JudgeServer, **settings: object) -> Judge:
    given = {"judge_url": server.url, "judge_model": "judge-1", "judge_seconds": 5.0} | settings
    return Judge(RewardSettings(**given), rubric="Be strict.", key=KEY)  # type: ignore[arg-type]


async def test_a_transcript_is_scored_once_however_often_it_is_asked_about() -> None:
    async with serve_judge(lambda messages: scores(7)) as server:
        judge, found = build_judge(server, judge_model=""), []

        async def ask() -> None:
            found.append(await judge.score(["the same"]))

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(ask)
        assert found == [[0.7]] * 5 and len(server.asked) == 1
        assert server.asked[0]["model"] == "judge-1" and server.asked[0]["temperature"] == 0
        assert server.keys == {f"Bearer {KEY}"}
        await judge.close()


async def test_kept_scores_are_found_by_another_worker(tmp_path: Path) -> None:
    async with serve_judge(lambda messages: scores(3)) as server:
        for _ in range(2):
            judge = build_judge(server, judge_cache=str(tmp_path))
            assert await judge.score(["the same"]) == [0.3]
            await judge.close()
        assert len(server.asked) == 1
        async for file in anyio.Path(tmp_path).iterdir():
            await file.write_text('{"scores": [')
        judge = build_judge(server, judge_cache=str(tmp_path))
        assert await judge.score(["the same"]) == [0.3] and len(server.asked) == 2
        await judge.close()


@pytest.mark.integration
async def test_a_busy_server_is_asked_again_and_a_refusal_is_not() -> None:
    async with serve_judge(lambda messages: scores(5)) as server:
        judge = build_judge(server)
        server.statuses.extend((429, 503))
        assert await judge.score(["a"]) == [0.5] and len(server.asked) == 3
        server.statuses.append(401)
        with pytest.raises(JudgeFailed, match="status 401") as raised:
            await judge.score(["b"])
        assert KEY not in str(raised.value) and len(server.asked) == 4
        await judge.close()


async def test_an_answer_that_was_cut_is_no_score() -> None:
    async with serve_judge(lambda messages: 'It writes {"scores": [10]}') as server:
        server.finish_reason = "length"
        judge = build_judge(server)
        with pytest.raises(JudgeFailed, match="judge_max_tokens"):
            await judge.score(["a"])
        await judge.close()


async def test_a_server_that_does_not_answer_costs_the_time_that_is_set() -> None:
    async with serve_judge(lambda messages: scores(5)) as server:
        server.held = anyio.Event()
        judge = build_judge(server, judge_seconds=0.3)
        with anyio.fail_after(5), pytest.raises(JudgeFailed, match=r"within 0\.3 s"):
            await judge.score(["a"])
        server.held.set()
        server.held = None
        assert await judge.score(["a"]) == [0.5], "a failure is not kept"
        await judge.close()


async def test_no_more_requests_are_under_way_than_are_set() -> None:
    async with serve_judge(lambda messages: scores(5)) as server:
        judge = build_judge(server, judge_concurrency=2)
        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(judge.score, [str(number)])
        assert len(server.asked) == 8 and server.most_at_once <= 2
        await judge.close()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"judge_url": "judge:8000"}, "base URL"),
        ({"judge_url": "http://me:secret@host"}, "JUDGE_API_KEY"),
        ({"judge_rubric": ""}, "needs reward.judge_rubric"),
        ({"judge_rubric": "absent.md"}, "absent.md"),
        ({"judge_cache": "absent"}, "no folder"),
        ({"weights": "judge"}, "NAME=WEIGHT"),
        ({"judge_url": "", "weights": "judge=1"}, "no judge is set"),
    ],
)
def test_a_judge_that_could_never_answer_is_refused_in_one_line(
    changed: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rubric.md").write_text("Be strict.")
    given = {"judge_url": "http://host:8000", "judge_rubric": "rubric.md"} | changed
    with pytest.raises(UserError, match=said) as raised:
        check_judge(RewardSettings(**given))  # type: ignore[arg-type]
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("key", ["sk-\u201chidden\u201d", "sk-hidden\n", "sk hidden"])
def test_a_key_that_no_header_may_have_is_refused_and_not_shown(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", key)
    (tmp_path / "rubric.md").write_text("Be strict.")
    with pytest.raises(UserError, match="JUDGE_API_KEY") as raised:
        check_judge(RewardSettings(judge_url="http://host:8000", judge_rubric=str(tmp_path / "rubric.md")))
    assert "hidden" not in str(raised.value)


async def test_without_a_judge_nothing_is_opened() -> None:
    async with open_judge(RewardSettings()) as judge:
        assert judge is None
