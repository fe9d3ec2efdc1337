"""An archive's segments in a bucket, against a server of S3 that fails in the ways that they do."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetbus.config.settings import ArchiveSettings
from fleetbus.errors import UserError
from fleetbus.log.archive_format import list_segments
from fleetbus.log.archive_reader import read_archive
from fleetbus_workers.recorder import archive_store
from fleetbus_workers.recorder.archive_keeper import ArchiveKeeper
from fleetbus_workers.recorder.archive_places import open_archive_places
from tests.support.log_builder import read_entries
from tests.unit.test_archive_retention import archive_log, build_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

URL = "s3://fleet/run"
SECRET = "s3cret-of-the-bucket"
FOREVER = 1 << 40

Answer = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes] | None]


class Bucket:
    """A server of S3 in this process. ``answer`` is asked first about each request; what it leaves alone is S3's."""

    def __init__(self) -> None:
        self.answer: Answer = lambda _environ, _start: None
        self.puts = 0
        self.hangs = threading.Event()
        """Ends what hangs."""

    def wrap(self, application: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
        def call(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            self.puts += environ["REQUEST_METHOD"] == "PUT"
            answered = self.answer(environ, start)
            return application(environ, start) if answered is None else answered

        return call


def refuse(status: str, code: str) -> Answer:
    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        said = f"<Error><Code>{code}</Code><Message>{code} it is</Message></Error>".encode()
        start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(said))), ("Connection", "close")])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [said]

    return answer


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    serving = pytest.importorskip("werkzeug.serving")
    boto3 = pytest.importorskip("boto3")
    import fsspec

    found = Bucket()
    application = moto.DomainDispatcherApplication(moto.create_backend_app)
    server = serving.make_server("127.0.0.1", 0, found.wrap(application), threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.port}"
    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", SECRET), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    client = boto3.client("s3", endpoint_url=url)
    client.create_bucket(Bucket="fleet")
    client.close()
    fsspec.filesystem("s3").clear_instance_cache()
    try:
        yield found
    finally:
        found.hangs.set()
        fsspec.filesystem("s3").clear_instance_cache()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    archive_log(tmp_path / "archive", read_entries(build_run()))
    return tmp_path / "archive"


def keep(archive: Path, **settings: Any) -> ArchiveKeeper:
    return ArchiveKeeper(archive, ArchiveSettings(store=URL, **settings))


def test_an_archive_is_copied_shortened_and_read_back_from_both(bucket: Bucket, archive: Path) -> None:
    segments = len(list_segments(archive))
    keeper = keep(archive, keep_bytes=1)
    keeper.keep(now_ns=0, needed=FOREVER, is_end=True)
    assert len(list_segments(archive)) < segments
    with open_archive_places((str(archive), URL)) as folder:
        assert list(read_archive(folder)) == read_entries(build_run())


def test_a_server_that_fails_for_a_while_is_asked_again(bucket: Bucket, archive: Path) -> None:
    failing, left = refuse("500 Internal Server Error", "InternalError"), iter(range(1))
    bucket.answer = lambda environ, start: failing(environ, start) if next(left, None) is not None else None
    keep(archive).keep(now_ns=0, needed=FOREVER, is_end=True)
    with open_archive_places((URL,)) as folder:
        assert list(read_archive(folder)) == read_entries(build_run())


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("500 Internal Server Error", "InternalError"),
        ("403 Forbidden", "InvalidAccessKeyId"),
    ],
)
def test_a_server_that_refuses_is_named_in_a_line_without_the_secret_and_costs_nothing(
    bucket: Bucket, archive: Path, status: str, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = list_segments(archive)
    bucket.answer = refuse(status, code)
    with caplog.at_level(logging.INFO), pytest.raises(OSError) as failed:
        keep(archive, keep_bytes=1).keep(now_ns=0, needed=FOREVER)
    assert "\n" not in str(failed.value) and URL in str(failed.value)
    assert SECRET not in f"{failed.value!r}{caplog.text}"
    assert list_segments(archive) == before
    with pytest.raises(UserError, match="the store's credentials") as read, open_archive_places((URL,)):
        pass
    assert "\n" not in str(read.value) and SECRET not in str(read.value)


def test_a_server_that_says_nothing_is_left_after_its_time(
    bucket: Bucket, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_store, "S3_SECONDS", 1.0)
    begun = time.monotonic()

    def hang(_environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        bucket.hangs.wait(60)
        start("500 Late", [])
        return []

    bucket.answer = hang
    with pytest.raises(OSError) as failed:
        keep(archive).keep(now_ns=0, needed=FOREVER)
    assert "\n" not in str(failed.value) and "fleet/run" in str(failed.value) and time.monotonic() - begun < 30


def test_an_upload_that_lost_its_end_is_made_again_before_the_folder_loses_it(bucket: Bucket, archive: Path) -> None:
    """A store that says that it has all, and has a part."""
    segments = list_segments(archive)
    keeper = keep(archive, keep_bytes=1)
    keeper.keep(now_ns=0, needed=0, is_end=True)
    files: Any = keeper._store._files  # type: ignore[union-attr]
    whole = files.cat_file(f"{URL}/{segments[0].name}")
    files.pipe_file(f"{URL}/{segments[0].name}", whole[:-1])
    put = bucket.puts
    keeper.keep(now_ns=0, needed=FOREVER)
    assert bucket.puts > put and files.cat_file(f"{URL}/{segments[0].name}") == whole
