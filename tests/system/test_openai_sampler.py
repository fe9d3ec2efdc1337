"""`OpenAISampler` against real HTTP servers: what they answer, how they fail, how episodes spread over them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from fleetbus.config.settings import Configuration, InferenceSettings, RunSettings
from fleetbus.errors import UserError
from fleetbus_schemas import ChatMessage, EngineLoad, Heartbeat, SamplingSettings, VersionSpan, decode, encode
from fleetbus_workers.assembly.engines import launch_engine
from fleetbus_workers.inference.base import EngineFailed, GenerationRequest, RequestRefused
from fleetbus_workers.inference.openai import OpenAISampler, pool
from fleetbus_workers.inference.openai.model_server import parse_load
from tests.support.model_server import STOP, ByteCodec, ModelServer, answer, is_unknown, logprob
from tests.support.openai_sampling import LIMIT_SECONDS, PROMPT, MakeServer, make_request, model_servers, open_sampler, until

pytest.importorskip("torch")

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 4.0
vllm:num_requests_running{engine="1",model_name="tiny"} 3.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.25
vllm:num_preemptions_total{engine="0",model_name="tiny"} 3.0
vllm:num_preemptions_total{engine="1",model_name="tiny"} NaN
vllm:num_preemptions_total{engine="2",model_name="tiny"} 1e308
vllm:num_preemptions_total{engine="3",model_name="tiny"} -1
vllm:num_preemptions_total
"""
"""Lines as vLLM writes them, and lines that no server should."""


@pytest.fixture
def make_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeServer]:
    monkeypatch.setattr(pool, "CHECK_SECONDS", 0.02)
    with model_servers() as make:
        yield make


@pytest.mark.parametrize("dialect", ["generate", "completions"])
async def test_tokens_go_in_and_tokens_with_logprobs_come_out(make_server: MakeServer, dialect: str) -> None:
    server = make_server(dialects=[dialect])
    async with open_sampler(server) as sampler:
        generation = await sampler.generate(make_request())
    assert generation.ids == answer(PROMPT, 6, "base")
    assert generation.logprobs == [logprob(token, 1.0) for token in generation.ids]
    assert (generation.finish_reason, generation.versions) == ("length", (VersionSpan(version=0, start=0, stop=6),))
    asked = server.asked[-1]
    parameters = asked["sampling_params"] if dialect == "generate" else asked
    assert asked["token_ids" if dialect == "generate" else "prompt"] == PROMPT
    assert (parameters["stop_token_ids"], parameters["seed"], asked["cache_salt"]) == ([STOP], 2**63 - 1, "fleetbus-0")


async def test_how_busy_servers_are_is_read_from_their_metrics(make_server: MakeServer) -> None:
    told, silent = make_server(), make_server()
    told.metrics = METRICS
    async with open_sampler(told, silent) as sampler:
        await until(lambda: sampler.engine_load.running is not None)
        assert sampler.engine_load == EngineLoad(running=7, waiting=2, kv_cache_use=0.5, preemptions=3)
        told.metrics = ""
        await until(lambda: sampler.engine_load == EngineLoad())


def test_a_server_that_lies_about_its_load_makes_no_heartbeat_that_cannot_be_sent() -> None:
    load = parse_load("vllm:num_requests_running 9007199254740992\n" * 3000)
    assert decode(Heartbeat, encode(Heartbeat(role="inference", worker="w", engine=load))).engine == load


async def test_a_stop_token_is_the_last_id(make_server: MakeServer) -> None:
    server = make_server()
    server.stop_after = 3
    async with open_sampler(server) as sampler:
        generation = await sampler.generate(make_request())
    assert (generation.ids[-1], len(generation.ids), generation.finish_reason) == (STOP, 3, "stop")


async def test_a_text_server_is_refused_for_training_before_anything_is_asked(make_server: MakeServer) -> None:
    server = make_server(dialects=[])
    with pytest.raises(BaseException) as caught:
        async with open_sampler(server):
            pytest.fail("it may not begin")
    assert isinstance(caught.value, UserError)
    assert "returns text only" in str(caught.value) and "--inference-purpose evaluate" in str(caught.value)
    assert server.asked == []


async def test_a_text_server_serves_evaluation_without_logprobs_and_refuses_what_would_be_trained(
    make_server: MakeServer,
) -> None:
    server = make_server(dialects=[])
    server.stop_after = 4
    async with open_sampler(server, purpose="evaluate") as sampler:
        generation = await sampler.generate(make_request([72, 105], trained=False, tokens=9))
        with pytest.raises(RequestRefused, match="evaluation only"):
            await sampler.generate(make_request())
    assert (generation.ids[-1], generation.finish_reason, len(generation.ids)) == (STOP, "stop", 4)
    assert is_unknown(generation.logprobs)
    assert (server.asked[-1]["prompt"], server.asked[-1]["stop"]) == ("Hi", ["<end>"])


async def test_a_server_whose_weights_are_fixed_is_refused_for_training(make_server: MakeServer) -> None:
    with pytest.raises(UserError, match="does not accept new weights"):
        async with open_sampler(make_server(takes_weights=False)):
            pytest.fail("it may not begin")


async def test_logprobs_before_the_temperature_are_refused_where_it_matters(make_server: MakeServer) -> None:
    raw, scaled = make_server(), make_server()
    scaled.scaled = True
    async with open_sampler(raw) as sampler:
        with pytest.raises(RequestRefused, match="processed_logprobs"):
            await sampler.generate(make_request(temperature=0.7))
        assert (await sampler.generate(make_request(temperature=0.7, trained=False))).ids
    async with open_sampler(scaled) as sampler:
        generation = await sampler.generate(make_request(temperature=0.5))
        assert generation.logprobs[0] == logprob(generation.ids[0], 0.5)
        refused: dict[str, Any] = {"top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
        for name, value in refused.items():
            with pytest.raises(RequestRefused, match=f"log-probabilities after {name} = {value}"):
                await sampler.generate(make_request(**{name: value}))


RECOMMENDED: dict[str, Any] = {
    "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1,
    "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.05,
}  # fmt: skip
"""What the folders of models recommend for chats, and servers use where a request says nothing."""


@pytest.mark.parametrize("dialect", ["generate", "completions", "text"])
async def test_a_model_s_generation_config_never_makes_the_sampler_another_policy(
    make_server: MakeServer, dialect: str
) -> None:
    server = make_server(dialects=[dialect])
    server.generation_config = RECOMMENDED
    purpose = "evaluate" if dialect == "text" else "train"
    async with open_sampler(server, purpose=purpose) as sampler:
        await sampler.generate(make_request(trained=dialect != "text"))
        neutral = {name: server.used[name] for name in RECOMMENDED}
        await sampler.generate(make_request(trained=False, **RECOMMENDED))
        chosen = {name: server.used[name] for name in RECOMMENDED}
    assert neutral == {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert chosen == RECOMMENDED


async def test_a_server_of_the_bare_protocol_is_asked_for_nothing_else_and_refused_what_it_cannot(
    make_server: MakeServer,
) -> None:
    server = make_server(dialects=[])
    server.knows_only_the_protocol = True
    async with open_sampler(server, purpose="evaluate") as sampler:
        assert (await sampler.generate(make_request(trained=False, top_p=0.9))).ids
        assert server.used["presence_penalty"] == 0.0
        assert "top_k" not in server.used
        with pytest.raises(RequestRefused, match=r"OpenAI protocol: top_k = 20, min_p = 0.1 cannot be set"):
            await sampler.generate(make_request(trained=False, top_k=20, min_p=0.1))


async def test_no_server_at_all_is_one_clear_line() -> None:
    dead = ModelServer().start()
    dead.stop()
    with pytest.raises(UserError, match=r"no server answers: http://127.0.0.1"):
        async with open_sampler(dead):
            pytest.fail("it may not begin")
    with pytest.raises(UserError, match=r"inference\.urls"):
        OpenAISampler([], codec=ByteCodec(), prompt=PROMPT)


@pytest.mark.integration
async def test_the_key_is_sent_and_never_shown(make_server: MakeServer) -> None:
    server = make_server()
    async with open_sampler(server, key="sk-very-secret") as sampler:
        server.statuses.extend([500] * 8)
        with pytest.raises(EngineFailed) as caught:
            await sampler.generate(make_request())
    assert "Bearer sk-very-secret" in server.keys
    assert "secret" not in str(caught.value)


async def test_the_tokens_of_a_broken_answer_are_kept_and_a_server_goes_on_after_them(make_server: MakeServer) -> None:
    servers = [make_server(dialects=["completions"]), make_server(dialects=["completions"])]
    async with open_sampler(*servers) as sampler:
        servers[0].break_after = 3
        generation = await sampler.generate(make_request())
        assert sampler.stats["failovers"] == 1
    assert generation.ids == answer(PROMPT, 6, "base")
    asked = [body["prompt"] for server in servers for body in server.asked]
    assert sorted(asked, key=len) == [PROMPT, [*PROMPT, *generation.ids[:3]]]


async def test_a_server_that_dies_is_left_out_and_taken_back_when_it_returns(make_server: MakeServer) -> None:
    first, second = make_server(), make_server()
    async with open_sampler(first, second) as sampler:
        first.stop()
        for number in range(4):
            assert (await sampler.generate(make_request(episode=f"e{number}"))).ids == answer(PROMPT, 6, "base")
        asked = len(first.asked)
        first.start()
        second.stop()
        assert (await sampler.generate(make_request())).ids == answer(PROMPT, 6, "base")
        assert len(first.asked) > asked


async def test_tries_are_bounded(make_server: MakeServer) -> None:
    server = make_server()
    server.statuses.extend([503] * 50)
    async with open_sampler(server, max_tries=3) as sampler:
        with pytest.raises(EngineFailed, match=r"3 servers failed this turn, last: .* status 503, told to fail"):
            await sampler.generate(make_request())
    assert len(server.asked) == 3


async def test_a_request_that_the_server_refuses_is_not_repeated(make_server: MakeServer) -> None:
    server = make_server()
    server.statuses.extend([400] * 5)
    async with open_sampler(server) as sampler:
        with pytest.raises(RequestRefused, match="status 400, told to fail"):
            await sampler.generate(make_request())
    assert len(server.asked) == 1


async def test_a_deadline_ends_the_stream_on_the_server_too(make_server: MakeServer) -> None:
    server = make_server()
    server.held, server.hold_after = True, 2
    async with open_sampler(server) as sampler, anyio.create_task_group() as group:
        group.start_soon(sampler.generate, make_request())
        await until(lambda: server.streaming == 1)
        group.cancel_scope.cancel()
    assert server.held
    await until(lambda: server.streaming == 0)


async def test_episodes_spread_over_servers_and_stay_where_they_began(make_server: MakeServer) -> None:
    servers = [make_server(), make_server()]
    for server in servers:
        server.held = True
    async with open_sampler(*servers, slots=8) as sampler:
        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(sampler.generate, make_request(episode=f"e{number}"))
            await until(lambda: servers[0].streaming + servers[1].streaming == 8)
            assert [server.streaming for server in servers] == [4, 4]
            for server in servers:
                server.held = False
        homes = {str(body["token_ids"]): 0 for body in servers[0].asked}
        assert homes
        for number in range(8):
            await sampler.generate(make_request(episode=f"e{number}"))
        assert (sampler.stats["turns_stayed"], sampler.stats["turns_moved"]) == (8, 0)


async def test_an_episode_spills_over_when_its_server_is_full(make_server: MakeServer) -> None:
    servers = [make_server(), make_server()]
    async with open_sampler(*servers, slots=2) as sampler:
        await sampler.generate(make_request(episode="mine"))
        home = servers[0] if servers[0].asked else servers[1]
        home.held = True
        async with anyio.create_task_group() as group:
            group.start_soon(sampler.generate, make_request(episode="mine"))
            await until(lambda: home.streaming == 1)
            assert (await sampler.generate(make_request(episode="mine"))).ids
            home.held = False
        assert sampler.stats["turns_moved"] == 1


async def test_never_more_than_its_slots_are_asked_at_once(make_server: MakeServer) -> None:
    server = make_server()
    async with open_sampler(server, slots=3) as sampler, anyio.create_task_group() as group:
        for number in range(12):
            group.start_soon(sampler.generate, make_request(episode=f"e{number}"))
    assert server.most_streaming <= 3


# As the command line opens it


async def test_the_engine_of_the_configuration_evaluates_on_a_text_server_with_the_model_s_own_tokens(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server(dialects=[])
    server.stop_after = 5
    configuration = Configuration(
        run=RunSettings(name="r", folder=str(tmp_path)),
        inference=InferenceSettings(engine="openai", urls=f" {server.url}/v1/ ,", purpose="evaluate"),
    )
    with anyio.fail_after(LIMIT_SECONDS):
        async with launch_engine(configuration, "inference-0") as (sampler, template), sampler.run():
            ids = template.encode_prompt([ChatMessage(role="user", content="Read the price.")], [])
            request = GenerationRequest(
                cache_key="e",
                ids=ids,
                sampling=SamplingSettings(),
                stop_ids=template.stop_ids,
                max_tokens=32,
                seed=1,
                trained=False,
            )
            generation = await sampler.generate(request)
    assert server.asked[-1]["prompt"] == "<|im_start|>user\nRead the price.<|im_end|>\n<|im_start|>assistant\n"
    assert server.asked[-1]["stop"] == ["<|im_end|>"]
    assert generation.ids[-1] in template.stop_ids
    assert len(template.decode_text(generation.ids)) == 4


def test_urls_that_are_none_are_refused_in_one_line(tmp_path: Path) -> None:
    async def open_engine() -> None:
        inference = InferenceSettings(engine="openai", urls="localhost:8000")
        async with launch_engine(Configuration(inference=inference), "inference-0"):
            pytest.fail("it may not open")

    with pytest.raises(UserError, match=r"http://host:8000"):
        anyio.run(open_engine)
