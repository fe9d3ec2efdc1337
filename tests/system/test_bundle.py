"""`fleetbus bundle`: what a copy of a page holds, what it replaces and what not, and that no secret is in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetbus.bus.base import StreamEntry
from fleetbus.recording import load_recording
from fleetbus.recording.episodes import EpisodeRow
from fleetbus.recording.format import OBJECTS
from fleetbus.recording.reader import read_header
from fleetbus.recording.redaction import Redactor
from fleetbus.recording.writer import create_recording
from fleetbus_schemas import Action, ChatMessage, EpisodeLabeled, Image, Observation, Subjects, decode, encode
from fleetbus_workers.cli.look import bundle
from fleetbus_workers.cli.program import run_program
from fleetbus_workers.observe.bundle.folder import BundleFolder
from fleetbus_workers.observe.monitor import episode_table

RECORDING = Path(__file__).parents[1] / "replay" / "recordings" / "warehouse.fbrec"
SECRET = "sk-ant-api03-" + "a1B2c3" * 8


def read_data(folder: Path, name: str) -> Any:
    text = (folder / "data" / f"{name}.js").read_text()
    assert text.startswith(f'fleetbus.give("{name}",') and text.endswith(");\n")
    return json.loads(json.loads(text[len(f'fleetbus.give("{name}",') : -len(");\n")]))


def list_files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """The recording with a label and a secret in what one episode was shown, said and commented."""
    header, entries = read_header(RECORDING), load_recording(RECORDING).entries
    first = next(each.subject.rpartition(".")[2] for each in entries if each.subject.split(".")[2] == "act")
    changed = [plant(entry) if entry.subject.endswith(f".{first}") else entry for entry in entries]
    label = EpisodeLabeled(episode_id=first, add=("leak",), comment=f"it prints {SECRET}", author="Ada")
    last = entries[-1]
    changed.append(
        StreamEntry(
            subject=Subjects(header.run).label(first), payload=encode(label), sequence=last.sequence + 1, time_ns=last.time_ns
        )
    )
    file = tmp_path / "labelled.fbrec"
    with create_recording(file, header) as writer:
        writer.add(changed)
    return file


def plant(entry: StreamEntry) -> StreamEntry:
    match entry.subject.split(".")[2]:
        case "obs":
            shown = ChatMessage(role="user", content=f"the key is {SECRET}")
            observation = decode(Observation, entry.payload)
            message: Any = type(observation)(**{**fields(observation), "messages": (*observation.messages, shown)})
        case "act":
            action = decode(Action, entry.payload)
            message = type(action)(**{**fields(action), "text": f"{action.text} {SECRET}"})
        case _:
            return entry
    return StreamEntry(subject=entry.subject, payload=encode(message), sequence=entry.sequence, time_ns=entry.time_ns)


def fields(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_a_copy_has_the_run_and_each_episode_and_no_secret(labelled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = labelled.parent / "copy"
    assert run_program(["bundle", str(labelled), "-o", str(folder)]) == 0
    assert capsys.readouterr().out.startswith(f"17 episodes: {folder / 'index.html'} (")
    run = read_data(folder, "run")
    assert run["overview"]["numbers"]["finished_episodes"] == 17 and run["overview"]["actions"] is False
    assert len(run["rows"]) == len(run["files"]) == 17
    assert [row["episode_id"] for row in run["rows"] if row["labels"]] == [
        name for name, file in run["files"].items() if read_data(folder, file)["labels"]
    ]
    (leaky,) = (row["episode_id"] for row in run["rows"] if row["labels"] == ["leak"])
    shown = read_data(folder, run["files"][leaky])
    turn = shown["turns"][0]
    assert "[redacted]" in turn["action"]["text"] and turn["action"]["ids"] == []  # token ids spell the text
    assert shown["comments"][0]["text"] == "it prints [redacted]"
    others = [read_data(folder, file) for name, file in run["files"].items() if name != leaky]
    assert all(turn["action"]["ids"] and turn["action"]["words"] for other in others for turn in other["turns"])
    for name in list_files(folder):
        assert SECRET.encode() not in (folder / name).read_bytes()
    assert {each for each in list_files(folder) if not each.startswith("data/")} == {
        "index.html", "page/style.css", "page/page.js", "page/answers.js", "fleetbus-bundle.json",
    }  # fmt: skip
    assert "/page/" not in (folder / "index.html").read_text().replace('"page/', "")


def test_filters_and_a_limit_choose_what_is_in_it_and_it_says_what_is_not(
    labelled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = labelled.parent / "copy"
    for arguments, line, episodes in (
        (["--limit", "3"], "the newest 3 of 17 episodes", 3),
        (["--label", "leak"], "1 that match, of 17 episodes", 1),
        (["--min-reward", "9"], "0 that match, of 17 episodes", 0),
        (["--limit", "0"], "17 episodes", 17),
    ):
        assert run_program(["bundle", str(labelled), "-o", str(folder), *arguments]) == 0
        assert capsys.readouterr().out.startswith(f"{line}: ")
        run = read_data(folder, "run")
        assert (run["left_out"], len(run["rows"])) == (line, episodes) and line in run["overview"]["ending"]["line"]
        assert len([name for name in list_files(folder) if name.startswith("data/e")]) == episodes
    assert run_program(["bundle", str(labelled), "-o", str(folder), "--outcome", "nosuch"]) == 2


def test_no_episode_is_compared_with_all_others(labelled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    are_siblings = episode_table._are_siblings

    def look(row: EpisodeRow, one: EpisodeRow) -> bool:
        looked.append(row.episode_id)
        return are_siblings(row, one)

    monkeypatch.setattr(episode_table, "_are_siblings", look)
    folder = labelled.parent / "copy"
    assert run_program(["bundle", str(labelled), "-o", str(folder)]) == 0
    run = read_data(folder, "run")
    siblings = [len(read_data(folder, file)["siblings"]) for file in run["files"].values()]
    assert len(looked) == sum(siblings) > 0


def test_images_that_episodes_show_are_files_of_the_copy_and_nothing_else_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = {
        "shown": b"\x89PNG\r\n\x1a\n and pixels", "page": b"<svg onload=alert(1)>", "..": b"\x89PNG\r\n\x1a\n up",
        "leaky": b"\x89PNG\r\n\x1a\n " + SECRET.encode(), "unnamed": b"\x89PNG\r\n\x1a\n never shown",
    }  # fmt: skip
    images = tuple(Image(object=name) for name in (*(set(objects) - {"unnamed"}), "missing"))
    entries = [
        show(entry, images) if entry.subject.split(".")[2] == "obs" else entry for entry in load_recording(RECORDING).entries
    ]
    file, folder = tmp_path / "images.fbrec", tmp_path / "copy"
    with create_recording(file, read_header(RECORDING)) as writer:
        writer.add(entries)
        for name, content in objects.items():
            writer.add_content(OBJECTS + name, content)
    assert run_program(["bundle", str(file), "-o", str(folder)]) == 0
    assert "17 episodes, 1 of 5 images: " in capsys.readouterr().out
    assert {name for name in list_files(folder) if name.startswith("api")} == {"api/images/shown"}
    assert (folder / "api" / "images" / "shown").read_bytes() == objects["shown"]


async def test_no_image_is_read_once_there_is_no_room_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    async def get(_: object, name: str, **__: object) -> bytes:
        read.append(name)
        return b"\x89PNG\r\n\x1a\n" + bytes(92)

    monkeypatch.setattr(bundle, "MOST_IMAGES_BYTES", 250)
    monkeypatch.setattr("fleetbus.bus.objects.get_content", get)
    monkeypatch.setattr("fleetbus_workers.weights.store.get_every_object", lambda *_: object())
    names = [f"image{number}" for number in range(100)]
    source: Any = SimpleNamespace(bus=object(), subjects=Subjects("run"), objects={})
    said = await bundle._add_images(source, names, Redactor(), BundleFolder(tmp_path))
    assert said == ", 2 of 100 images" and read == names[:3]


def show(entry: StreamEntry, images: tuple[Image, ...]) -> StreamEntry:
    observation = decode(Observation, entry.payload)
    message = Observation(**{**fields(observation), "messages": (ChatMessage(role="user", content=images),)})
    return StreamEntry(subject=entry.subject, payload=encode(message), sequence=entry.sequence, time_ns=entry.time_ns)


@pytest.mark.parametrize("kind", ["other files", "a file beside an earlier copy", "a file", "a link"])
def test_a_place_with_something_else_is_refused_in_one_line_and_left_as_it_is(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copy"
    if kind == "a file":
        folder.write_text("mine")
    elif kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        if kind == "a file beside an earlier copy":
            assert run_program(["bundle", str(RECORDING), "-o", str(folder), "--limit", "1"]) == 0
            capsys.readouterr()
        (folder / "data").mkdir(parents=True, exist_ok=True)
        (folder / "data" / "mine.txt").write_text("mine")
    before = list_files(tmp_path)
    assert run_program(["bundle", str(RECORDING), "-o", str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "give another --output" in captured.err
    assert list_files(tmp_path) == before


def test_an_error_on_the_way_leaves_the_earlier_copy_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "deep" / "copy"
    assert run_program(["bundle", str(RECORDING), "-o", str(folder), "--limit", "2"]) == 0
    before = {name: (folder / name).read_bytes() for name in list_files(folder)}

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "page.js")

    with monkeypatch.context() as patched:
        patched.setattr("fleetbus_workers.observe.bundle.folder.BundleFolder.add_page", fail)
        assert run_program(["bundle", str(RECORDING), "-o", str(folder)]) == 1
        assert "the disk is full" in capsys.readouterr().err
    assert {name: (folder / name).read_bytes() for name in list_files(folder)} == before
    assert [each.name for each in folder.parent.iterdir()] == ["copy"]
    shutil.rmtree(folder)
    folder.mkdir()  # an empty folder is taken
    assert run_program(["bundle", str(RECORDING), "-o", str(folder)]) == 0
