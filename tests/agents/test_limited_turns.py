"""An agent's `max_tokens` and `stop` end the policy's answers, and what was sampled before them stays exact."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from fleetbus.config.settings import LimitSettings
from fleetbus_schemas import Action, ChatMessage, Observation, SamplingSettings, Task, VersionSpan
from fleetbus_schemas.tokens import unpack_ids
from fleetbus_workers.environment.adapters.agent.conversations import Conversations, cut_at_stop
from fleetbus_workers.environment.adapters.agent.dialects import DIALECTS, messages
from fleetbus_workers.environment.adapters.agent.dialects.base import AgentCall
from fleetbus_workers.environment.adapters.agent.sessions import AgentSession
from fleetbus_workers.environment.base import NO_LIMITS, TurnLimits
from fleetbus_workers.inference.base import Generation
from fleetbus_workers.inference.canned import CannedSampler, CannedTemplate
from fleetbus_workers.inference.stops import end_at_stop
from tests.agents.endpoint_support import BODIES, CHAT, GEMINI, MESSAGES
from tests.agents.scripted_factory import build_scripted_agents
from tests.support.small_deployment import build_configuration, small_deployment

LIMITS = LimitSettings(open=30, reset=30, step=30, action=30, verify=30, close=30, episode=50, grace=10, drain=10)
SAID = (ChatMessage(role="user", content="Go."),)


def generate(text: str) -> Generation:
    ids = list(text.encode())
    spans = (VersionSpan(version=1, start=0, stop=3), VersionSpan(version=2, start=3, stop=len(ids)))
    return Generation(ids=ids, logprobs=[-float(id) for id in ids], finish_reason="length", versions=spans)


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("one two", ["x"], None),
        ("one two", [], None),
        ("one two", ["e"], "one"),
        ("one two", ["two", "ne t"], "one t"),
        ("one", ["one"], None),
        ("é!", ["!"], None),
    ],
)
def test_a_generation_ends_with_the_token_that_completes_a_stop(text: str, stops: list[str], kept: str | None) -> None:
    whole = generate(text)
    ended = end_at_stop(whole, stops, lambda ids: bytes(ids).decode(errors="replace"))
    assert bytes(ended.ids).decode() == (text if kept is None else kept)
    assert ended.logprobs == whole.logprobs[: len(ended.ids)]
    assert sum(span.stop - span.start for span in ended.versions) == len(ended.ids)
    assert ended.finish_reason == ("length" if not any(stop in text for stop in stops) else "stop")


@pytest.mark.parametrize("place", [0, 1, 100, 16_000, 32_700])
def test_a_stop_in_a_long_answer_is_found_without_decoding_it_again_and_again(place: int) -> None:
    whole = generate("a" * place + "END" + "é" * ((32_765 - place) // 2))
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return bytes(ids).decode(errors="replace")

    assert len(end_at_stop(whole, ["END"], decode).ids) == place + 3
    assert sum(decoded) <= 4.1 * len(whole.ids)


def test_a_stop_is_found_too_where_the_text_depends_on_what_is_far_before() -> None:
    """As with fallbacks to bytes: where one byte of a run makes no character, none of the run does."""

    def decode(ids: Sequence[int]) -> str:
        return "".join(map(chr, ids)) if ids[:1] == [ord("a")] else "?" * len(ids)

    for stops, kept in ((["END"], 503), (["?"], 1000)):
        text = "a" * 500 + "END" + "b" * (1000 - 503 - 1) + "?"
        assert len(end_at_stop(generate(text), stops, decode).ids) == kept


def test_limits_only_narrow_the_settings_of_the_episode() -> None:
    settings = SamplingSettings(max_tokens=100, stop=("<done>",))
    assert NO_LIMITS.apply(settings) is settings
    assert TurnLimits(max_tokens=200).apply(settings) == settings
    assert TurnLimits(max_tokens=5, stop=("x", "<done>")).apply(settings) == SamplingSettings(
        max_tokens=5, stop=("<done>", "x", "<done>")
    )


def test_the_text_ends_before_the_first_stop() -> None:
    assert cut_at_stop("act\nObservation: 1 END", ["END", "\nObservation:"]) == ("act", "\nObservation:")
    assert cut_at_stop("act", ["END"]) == ("act", "")


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, {"stop": ["END", ""]}),
        (CHAT, {"stop": "END"}),
        (MESSAGES, {"stop_sequences": ["END"]}),
        (GEMINI, {"generationConfig": {"stopSequences": ["END"]}}),
    ],
)
def test_stops_are_read_in_every_protocol_that_has_them(path: str, field: dict[str, object]) -> None:
    dialect = DIALECTS.get(path) or DIALECTS["/v1beta/models/{model}:{method}"]
    assert dialect.parse(BODIES[path] | field | {"method": "generateContent"}).stop == ("END",)


@pytest.mark.integration
@pytest.mark.parametrize("own_stops", [("<done>",), ("<done>", "END")])
async def test_an_answer_that_a_stop_ended_is_continued_live_and_after_a_takeover(own_stops: tuple[str, ...]) -> None:
    action = Action(episode_id="e", attempt=1, turn=0, text="one END")
    for is_restored in (False, True):
        session = AgentSession(key="k")
        conversations = Conversations(session)
        if is_restored:
            sampling = TurnLimits(stop=("END",)).apply(SamplingSettings(stop=own_stops))
            observed = Observation(
                episode_id="e",
                attempt=1,
                turn=0,
                policy="p",
                messages=SAID,
                tokens_left=9,
                environment_lane="e0",
                deadline_ns=1,
                sampling=sampling,
            )
            conversations.restore_call(observed, own_stops=own_stops)
        else:
            pending = session.enter(AgentCall(messages=SAID, stop=("END",)), "d", repetition=False)
            async with pending.hold_request():
                await conversations.receive_call()
        assert conversations.turn_limits == TurnLimits(stop=("END",))
        answer = conversations.answer(action)
        assert (answer.text, answer.stopped_by) == ("one ", "END")
        shown = messages.render(answer, "m")
        assert (shown["stop_reason"], shown["stop_sequence"]) == ("stop_sequence", "END")
        said = (*SAID, ChatMessage(role="assistant", content="one"), ChatMessage(role="user", content="On."))
        following = session.enter(AgentCall(messages=said), "f", repetition=False)
        async with following.hold_request():
            attached = await conversations.receive_call()
        assert attached is not None and (attached.segment, len(attached.messages)) == (0, 1)
        assert conversations.turn_limits == NO_LIMITS


@pytest.mark.parametrize("weights", [None, {"verifier": 1.0}], ids=["plain", "weighed"])
async def test_the_limits_of_a_call_reach_the_sampler(weights: dict[str, float] | None) -> None:
    make = build_scripted_agents(weights)
    config = {"calls": 2, "reward": 1, "limits": [{"stop": [" tw"]}, {"max_tokens": 3}]}
    with anyio.fail_after(60):
        async with make.run(), small_deployment(build_configuration(limits=LIMITS)) as fleet:
            await fleet.publish_policy()
            fleet.inference("i1", sampler=CannedSampler("one two three"), template=CannedTemplate())
            fleet.environment("e1", make=make)
            await fleet.request("e", task=Task(key="t", prompt="Say", config=config))
            result = await fleet.result("e")
            assert result.outcome == "completed", result.error
            actions = await fleet.actions()
    assert [(action.text, action.finish_reason) for action in actions] == [("one tw", "stop"), ("one", "length")]
    assert [len(unpack_ids(action.sampled)) for action in actions] == [6, 3]
    assert not result.segments, "the second call continued the first"
