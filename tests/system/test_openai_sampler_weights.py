"""New weights on OpenAI-compatible servers: checked, loaded into every one, and what a failed load leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from fleetbus_schemas import VersionSpan
from fleetbus_workers.inference.openai import pool
from fleetbus_workers.inference.openai.dialects import StreamChunk
from fleetbus_workers.inference.openai.partial_generation import PartialGeneration
from fleetbus_workers.weights.file import WeightsRejected
from tests.support.model_server import answer
from tests.support.openai_sampling import PROMPT, MakeServer, Weights, make_request, model_servers, open_sampler, until

pytest.importorskip("torch")


@pytest.fixture
def make_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeServer]:
    monkeypatch.setattr(pool, "CHECK_SECONDS", 0.02)
    with model_servers() as make:
        yield make


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return Weights(tmp_path)


async def test_fixed_weights_stand_for_the_untrained_policy_only(make_server: MakeServer, weights: Weights) -> None:
    async with open_sampler(make_server(takes_weights=False), purpose="evaluate") as sampler:
        await sampler.load(weights.published(3, step=0))
        generation = await sampler.generate(make_request(trained=False))
        assert generation.versions[0].version == sampler.version == 3
        with pytest.raises(WeightsRejected, match="no new weights"):
            await sampler.load(weights.published(4, step=1))


async def test_new_weights_are_checked_linked_and_loaded_into_every_server(make_server: MakeServer, weights: Weights) -> None:
    servers = [make_server(), make_server()]
    async with open_sampler(*servers, weights=weights.reloadable) as sampler:
        await sampler.load(weights.published(1))
        assert sampler.version == 1
        assert [server.label for server in servers] == ["fleetbus-1"] * 2
        assert servers[0].calls == ["pause", "collective_rpc", "reset_prefix_cache", "update_weight_version", "resume"]
        generation = await sampler.generate(make_request())
        await sampler.load(weights.published(2))
        assert [folder.name for folder in (weights.folder / "served").iterdir()] == ["v000002"]
    assert generation.ids == answer(PROMPT, 6, "fleetbus-1")


async def test_an_answer_in_the_middle_goes_on_under_the_new_weights_with_a_span_for_each(
    make_server: MakeServer, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, append_chunk = make_server(), PartialGeneration.append_chunk
    taken: list[StreamChunk] = []

    def counting(answer: PartialGeneration, piece: StreamChunk, version: int) -> None:
        append_chunk(answer, piece, version)
        taken.append(piece)

    monkeypatch.setattr(PartialGeneration, "append_chunk", counting)
    async with open_sampler(server, weights=weights.reloadable) as sampler:
        await sampler.load(weights.published(1))
        server.held, server.hold_after = True, 2
        found = []

        async def generate() -> None:
            found.append(await sampler.generate(make_request()))

        async with anyio.create_task_group() as group:
            group.start_soon(generate)
            await until(lambda: len(taken) == 2)
            await sampler.load(weights.published(2))
            server.held = False
    [generation] = found
    [old, new] = generation.versions
    assert (old.version, new.version, new.stop) == (1, 2, 6) and old.stop == new.start == 2
    begun = answer(PROMPT, old.stop, "fleetbus-1")
    assert generation.ids == [*begun, *answer([*PROMPT, *begun], 6 - old.stop, "fleetbus-2")]
    assert sampler.stats["interruptions"] == 1


@pytest.mark.parametrize("shape", [(3, 2), (2, 4)])
async def test_weights_of_another_shape_never_reach_a_server(
    make_server: MakeServer, weights: Weights, shape: tuple[int, ...]
) -> None:
    server = make_server()
    async with open_sampler(server, weights=weights.reloadable) as sampler:
        with pytest.raises(WeightsRejected, match="has shape"):
            await sampler.load(weights.published(1, shape=shape))
        assert (sampler.version, server.reloads) == (0, [])
        assert (await sampler.generate(make_request())).versions[0].version == 0


async def test_a_failed_load_brings_the_old_weights_back_before_anything_is_sampled(
    make_server: MakeServer, weights: Weights
) -> None:
    server = make_server()
    server.bad_folders = {"v000002"}
    async with open_sampler(server, weights=weights.reloadable) as sampler:
        await sampler.load(weights.published(1))
        with pytest.raises(WeightsRejected, match="no server loaded version 2"):
            await sampler.load(weights.published(2))
        assert (sampler.version, server.label) == (1, "fleetbus-1")
        assert [Path(folder).name for folder in server.reloads] == ["v000001", "v000002", "v000001"]
        assert (await sampler.generate(make_request())).ids == answer(PROMPT, 6, "fleetbus-1")


async def test_a_load_that_is_ended_in_the_middle_leaves_no_server_paused(make_server: MakeServer, weights: Weights) -> None:
    """As when a worker is interrupted: the server outlives it, and serves others."""
    server = make_server()
    server.held_call = "collective_rpc"
    async with open_sampler(server, weights=weights.reloadable) as sampler:
        async with anyio.create_task_group() as loading:
            loading.start_soon(sampler.load, weights.published(1))
            await until(lambda: "collective_rpc" in server.calls)
            loading.cancel_scope.cancel()
        assert server.calls[-1] == "resume"


async def test_a_server_that_was_started_again_gets_the_weights_before_it_answers(
    make_server: MakeServer, weights: Weights
) -> None:
    server = make_server()
    async with open_sampler(server, weights=weights.reloadable) as sampler:
        await sampler.load(weights.published(1))
        server.label = "base"  # as after a restart that no connection noticed
        generation = await sampler.generate(make_request())
        assert server.label == "fleetbus-1"
    assert generation.ids == answer(PROMPT, 6, "fleetbus-1")
    assert generation.versions == (VersionSpan(version=1, start=0, stop=6),)


async def test_one_server_that_cannot_load_is_left_out_until_it_can(make_server: MakeServer, weights: Weights) -> None:
    good, bad = make_server(), make_server()
    bad.bad_folders = {"v000001"}
    async with open_sampler(good, bad, weights=weights.reloadable) as sampler:
        await sampler.load(weights.published(1))
        for number in range(4):
            await sampler.generate(make_request(episode=f"e{number}"))
        assert bad.asked == []
        bad.bad_folders = set()
        await until(lambda: bad.label == "fleetbus-1")
