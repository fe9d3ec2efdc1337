"""Objects that messages refer to are in the recording, within bounds and without readable secrets, and replays have them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fleetbus.bus.base import Bus, StreamEntry
from fleetbus.recording import Recording, RecordingHeader, load_recording
from fleetbus.recording.export import Export
from fleetbus.recording.objects import add_objects, find_referenced_objects
from fleetbus.recording.redaction import Redactor
from fleetbus.recording.writer import FILE_PART_BYTES, create_recording
from fleetbus_schemas import Action, ChatMessage, Image, Observation, ShownImage, Subjects, Text, encode
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.images.reader import ImageMissing, image_reader
from fleetbus_workers.inference.base import PromptDelta
from fleetbus_workers.inference.scripted import ScriptedSampler, ScriptedTemplate
from fleetbus_workers.inference.worker import run_inference
from fleetbus_workers.replay.replay_environment import ReplayBus

HERE = Path(__file__).parent
RUN = "pictures"
SUBJECTS = Subjects(RUN)


def name_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def shows(sequence: int, *contents: bytes, episode: str = "e") -> StreamEntry:
    parts = (Text(text="look"), *(Image(object=name_of(content)) for content in contents))
    observation = Observation(
        episode_id=episode,
        attempt=1,
        turn=sequence,
        policy="default",
        messages=(ChatMessage(role="user", content=parts),),  # type: ignore[arg-type]
        tokens_left=9,
        environment_lane="e0",
        deadline_ns=1,
    )
    subject = SUBJECTS.observation("default", "any", episode)
    return StreamEntry(sequence=sequence, time_ns=sequence, subject=subject, payload=encode(observation))


async def recorded(
    file: Path, entries: Sequence[StreamEntry], bucket: dict[str, bytes], *, redactor: Redactor | None = None, **options: Any
) -> tuple[Recording, dict[str, int]]:
    """The entries with the objects that they name, written and read back; and what was said of the objects."""

    async def fetch(name: str) -> bytes | None:
        return bucket.get(name)

    with create_recording(file, RecordingHeader(run=RUN)) as writer:
        export = Export(writer, redactor=redactor)
        export.write(entries)
        added = await add_objects(writer, export.references.names, fetch, redactor=redactor, **options)
    return load_recording(file), {name: getattr(added, name) for name in added.__struct_fields__}


def bucket_of(*contents: bytes) -> dict[str, bytes]:
    return {name_of(content): content for content in contents}


async def test_objects_are_read_back_once_each_whatever_their_size(tmp_path: Path) -> None:
    small, large = b"\x89PNG small", bytes(range(256)) * (FILE_PART_BYTES // 256) + b"more"
    bucket = bucket_of(small, large, b"nobody names this one")
    recording, said = await recorded(tmp_path / "a.fbrec", [shows(1, small), shows(2, small, large)], bucket)
    assert recording.objects == bucket_of(small, large)
    assert recording.files == {} and recording.torn == "" and len(recording.entries) == 2
    assert said == {"objects": 2, "bytes": len(small) + len(large), "missing": 0, "withheld": 0, "beyond": 0}


async def test_what_there_is_no_room_for_and_what_is_gone_is_counted(tmp_path: Path) -> None:
    first, second, third = b"1" * 60, b"2" * 60, b"3" * 40
    bucket = bucket_of(first, second, third)
    entries = [shows(1, first, second), shows(2, third, b"gone")]
    recording, said = await recorded(tmp_path / "a.fbrec", entries, bucket, limit_bytes=100)
    assert recording.objects == bucket_of(first, third)
    assert (said["objects"], said["beyond"], said["missing"]) == (2, 1, 1)


@pytest.mark.parametrize(
    "content",
    [
        b'{"api_key": "abcdefgh12345678"}',
        b"\x89PNG\x00 tEXt sk-abcdefghijklmnopqrstuv \x00",
        b"\x00\xff known-to-be-secret \x00",
    ],
)
async def test_an_object_with_a_secret_in_it_is_withheld_unless_secrets_are_kept(content: bytes, tmp_path: Path) -> None:
    redactor = Redactor(["known-to-be-secret"])
    entries = [shows(1, content, b"innocent")]
    bucket = bucket_of(content, b"innocent")
    cleaned, said = await recorded(tmp_path / "a.fbrec", entries, bucket, redactor=redactor)
    assert cleaned.objects == bucket_of(b"innocent") and said["withheld"] == 1
    kept, said = await recorded(tmp_path / "b.fbrec", entries, bucket)
    assert kept.objects == bucket and said["withheld"] == 0


async def test_actions_name_objects_and_other_entries_name_none() -> None:
    image = ShownImage(object=name_of(b"x"), start=0, stop=1)
    action = Action(episode_id="e", attempt=1, turn=0, text="", images=(image,))
    entry = StreamEntry(sequence=1, time_ns=1, subject=SUBJECTS.action("e0", "e"), payload=encode(action))
    assert list(find_referenced_objects(entry)) == [name_of(b"x")]
    broken = StreamEntry(sequence=2, time_ns=1, subject=SUBJECTS.action("e0", "e"), payload=b"images")
    assert list(find_referenced_objects(broken)) == []
    recording = load_recording(HERE / "recordings" / "guessing.fbrec")
    assert not any(name for entry in recording.entries for name in find_referenced_objects(entry)) and recording.objects == {}


async def test_a_recording_that_is_cut_out_of_another_keeps_the_objects_of_its_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [shows(1, b"mine", episode="one"), shows(2, b"other", episode="two")]
    await recorded(tmp_path / "a.fbrec", entries, bucket_of(b"mine", b"other"))
    import anyio.to_thread

    def cut(*options: str) -> tuple[dict[str, Any], dict[str, bytes]]:
        file = tmp_path / "b.fbrec"
        command = ["record", str(tmp_path / "a.fbrec"), "-o", str(file), "--episode", "one", "--json", "--force", *options]
        assert run_program(command) == 0
        return json.loads(capsys.readouterr().out)["objects"], load_recording(file).objects

    said, objects = await anyio.to_thread.run_sync(cut)
    assert objects == bucket_of(b"mine") and (said["objects"], said["named"]) == (1, 1)
    said, objects = await anyio.to_thread.run_sync(cut, "--no-objects")
    assert objects == {} and (said["objects"], said["named"]) == (0, 1)
    said, objects = await anyio.to_thread.run_sync(cut, "--max-objects", "0")
    assert objects == {} and said["beyond"] == 1


async def test_a_worker_under_test_reads_the_recorded_images_and_is_told_of_those_that_lack(tmp_path: Path) -> None:
    from fleetbus.bus.memory import MemoryServer

    recording, _ = await recorded(tmp_path / "a.fbrec", [shows(1, b"seen")], bucket_of(b"seen"))
    images = image_reader(ReplayBus(MemoryServer(), RUN, recording.objects), RUN)
    assert await images.read(name_of(b"seen")) == b"seen"
    with pytest.raises(ImageMissing, match="the recording contains no object"):
        await images.read(name_of(b"unseen"))


class Overlooked:
    """`Images` for a policy without eyes."""

    async def expand(self, ids: list[int], messages: Sequence[ChatMessage]) -> PromptDelta:
        return PromptDelta(ids=ids)

    async def load_images(self, images: Sequence[ShownImage]) -> tuple[Any, ...]:
        return ()


async def pictures_recorded() -> Recording:
    """Two episodes that show pictures, played by a policy that does not look."""
    from fleetbus.bus.memory_objects import MemoryObjectStore
    from fleetbus_workers.environment.adapter_context import AdapterContext
    from fleetbus_workers.environment.adapters.colours import build
    from fleetbus_workers.environment.images.store import build_image_store
    from tests.support.deployment_member import Member
    from tests.support.small_deployment import build_configuration, small_deployment
    from tests.support.tool_calls import NoGrader

    bucket: dict[str, bytes] = {}
    store_image = build_image_store(MemoryObjectStore(bucket))
    make = build(AdapterContext(spec="colours:2", grader=NoGrader(), store_image=store_image))
    async with small_deployment(build_configuration()) as fleet:
        fleet.environment("env", make=make)

        async def answer(member: Member, bus: Bus) -> None:
            await run_inference(
                bus,
                configuration=build_configuration(),
                name="inf",
                drain=member.drain,
                sampler=ScriptedSampler(),
                template=ScriptedTemplate(),
                images=Overlooked(),
            )

        fleet.start("inference", "inf", answer)
        for episode in ("one", "two"):
            await fleet.request(episode)
            assert (await fleet.result(episode)).outcome == "completed"
        entries = [entry async for entry in fleet.bus.scan([fleet.subjects.log])]
    tables = {"environment": {"images": True}}
    return Recording(
        path=Path("memory"), header=RecordingHeader(run="small", configuration=tables), entries=entries, objects=bucket
    )


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_pictures_that_an_environment_shows_are_compared_by_their_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    from fleetbus_workers.environment.adapters import colours
    from fleetbus_workers.replay import Replay, replay_recording

    recording = await pictures_recorded()
    assert recording.objects and recording.objects.keys() == {
        name for entry in recording.entries for name in find_referenced_objects(entry)
    }
    report = await replay_recording(recording, Replay(environment="colours:2"))
    report.check()
    assert report.compared["Observation"] == 4
    monkeypatch.setitem(colours.COLOURS, "red", (221, 40, 40))
    monkeypatch.setitem(colours.COLOURS, "green", (41, 190, 60))
    monkeypatch.setitem(colours.COLOURS, "blue", (51, 70, 220))
    monkeypatch.setitem(colours.COLOURS, "yellow", (231, 210, 40))
    changed = await replay_recording(recording, Replay(environment="colours:2"))
    assert changed.first is not None and changed.first.field == "messages[0].content[0].object"


def with_an_image_that_is_gone() -> Recording:
    """A recording whose first trained Action was shown an image that nobody recorded."""
    import msgspec

    from fleetbus_schemas import decode

    recording = load_recording(HERE / "recordings" / "guessing.fbrec")
    for index, entry in enumerate(recording.entries):
        if ".act." in entry.subject and ".g0" in entry.subject:
            image = ShownImage(object=name_of(b"gone"), start=0, stop=1)
            action = msgspec.structs.replace(decode(Action, entry.payload), images=(image,))
            recording.entries[index] = msgspec.structs.replace(entry, payload=encode(action))
            return recording
    raise AssertionError("no action")


def test_a_learner_that_would_train_on_images_that_are_gone_says_so_at_once() -> None:
    from fleetbus.errors import UserError
    from fleetbus_workers.replay.fixtures import replay_blocking

    with pytest.raises(UserError, match="lacks 1 of 1 images"):
        replay_blocking(with_an_image_that_is_gone(), role="learner", until="batches")


def test_turns_upon_images_that_are_gone_are_left_out_and_the_others_compared() -> None:
    pytest.importorskip("torch")
    from fleetbus_workers.replay.fixtures import replay_blocking

    model = HERE / "recordings" / "model"
    report = replay_blocking(with_an_image_that_is_gone(), role="inference", model=model, patience_seconds=200.0)
    report.check()
    left_out = report.skipped["actions upon images that the recording does not hold"]
    assert left_out == 2 and report.compared["Action"] == 64


def test_a_manifest_that_was_too_long_for_its_message_is_put_back_into_it() -> None:
    import msgspec

    from fleetbus_schemas import PolicyPublished, TensorEntry
    from fleetbus_workers.weights.manifests import inline_manifest

    manifest = (TensorEntry(name="w", shape=(2, 3), dtype="F32", sha256="0" * 64),)
    content = msgspec.json.encode(manifest)
    published = PolicyPublished(
        policy="p",
        version=1,
        lineage="l1",
        step=1,
        uri="file:///w",
        manifest=(),
        size_bytes=1,
        manifest_object=name_of(content),
    )
    entry = StreamEntry(sequence=1, time_ns=1, subject=SUBJECTS.policy("p"), payload=encode(published))
    assert list(find_referenced_objects(entry)) == [name_of(content)]
    whole = inline_manifest(published, bucket_of(content))
    assert (whole.manifest, whole.manifest_object) == (manifest, "")
    assert inline_manifest(published, {}) is published and inline_manifest(whole, {}) is whole
