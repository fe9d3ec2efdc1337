"""Pictures of every view of a run: the page in Chromium at two widths, light and dark, and `top` at 80 and 160 columns.

`just screenshots RUN FOLDER`, in the folder that has the run; needs `pip install playwright pillow` and a chromium on the PATH.
With ``--readme`` only the pictures of README.md are written, small; one shows an episode that another worker continued, so kill
an environment worker while the run trains.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WIDTHS = {"wide": (1280, 900), "phone": (390, 844)}
COLUMNS = (80, 160)
START_SECONDS = 60.0


@contextmanager
def serve_page(run: str) -> Iterator[str]:
    """The address of the page of a run, served for the length of the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "fleetbus_workers.cli", "monitor", run, "--no-key", "--port", str(port)])
    url = f"http://127.0.0.1:{port}/"
    try:
        ends = time.monotonic() + START_SECONDS
        while not is_served(url):
            assert time.monotonic() < ends and process.poll() is None, "the page is not served"
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def is_served(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def list_views(page: Any, url: str) -> dict[str, str]:
    """Names and addresses of the views; an episode without reward stands for all, whose group has others."""
    while page.request.get(f"{url}api/overview").json()["log"]["is_behind"]:
        page.wait_for_timeout(500)
    found = page.request.get(f"{url}api/episodes?state=completed&split=train&sort=reward").json()["rows"]
    rewards = page.request.get(f"{url}api/episodes/{found[0]['episode_id']}").json()["rewards"]
    sibling = max(rewards, key=lambda name: rewards[name] or 0.0)  # one that did better
    places = {
        "overview": "",
        "curves": "curves",
        "groups": "groups",
        "episodes": "episodes",
        "episode": f"episode/{found[0]['episode_id']}",
        "tasks": "tasks",
        "runs": "runs",
        "compare": f"compare/{found[0]['episode_id']}/{sibling}",
    }
    return {name: f"{url}#/{place}" for name, place in places.items()}


def draw_terminal(browser: Any, run: str, columns: int, file: Path) -> None:
    """`fleetbus top RUN --once` as a terminal of so many columns shows it."""
    from rich.console import Console
    from rich.text import Text

    command = [sys.executable, "-m", "fleetbus_workers.cli", "top", run, "--once"]
    variables = {**os.environ, "COLUMNS": str(columns), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    shown = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False).stdout
    console = Console(record=True, width=columns, file=open(os.devnull, "w"))  # nothing is written
    console.print(Text.from_ansi(shown.rstrip()))
    html = console.export_html(inline_styles=True)
    page = browser.new_page(viewport={"width": columns * 10 + 60, "height": 100}, color_scheme="light")
    page.set_content(html.replace('<pre style="', "<pre id='terminal' style=\"display:inline-block;padding:8px;", 1))
    page.locator("#terminal").screenshot(path=str(file))
    page.close()


def draw_all(run: str, folder: Path, *, for_readme: bool) -> None:
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with serve_page(run) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        views = list_views(browser.new_page(), url)
        if for_readme:
            draw_view(browser, views["overview"], (1280, 800), "light", folder / "page.png")
            draw_episode(browser, url, find_taken_over(browser.new_page(), url), folder / "episode.png")
        else:
            for name, address in views.items():
                for width, size in WIDTHS.items():
                    for scheme in ("light", "dark"):
                        draw_view(browser, address, size, scheme, folder / f"{name}-{width}-{scheme}.png")
        for columns in COLUMNS[: 1 if for_readme else 2]:
            draw_terminal(browser, run, columns, folder / ("terminal.png" if for_readme else f"terminal-{columns}.png"))
        browser.close()
    if for_readme:
        shrink(folder)


def draw_view(browser: Any, address: str, size: tuple[int, int], scheme: str, file: Path) -> None:
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page.goto(address)
    page.wait_for_timeout(2500)  # the charts are drawn as the stream of the server comes in
    page.screenshot(path=str(file))
    page.close()


def find_taken_over(page: Any, url: str) -> str:
    """The rewarded training episode that another worker continued after a turn was answered, with the most unlikely tokens."""
    found = page.request.get(f"{url}api/episodes?state=completed&split=train&sort=-attempts&limit=1000").json()["rows"]
    unlikely: dict[str, int] = {}
    for row in [row for row in found if row["attempts"] == 2 and row["reward"] and row["turns"] <= 4]:
        episode = page.request.get(f"{url}api/episodes/{row['episode_id']}").json()
        if any(0 < claim.get("resumed_at_turn", 0) < row["turns"] for claim in episode["claims"]):
            logprobs = [value for turn in episode["turns"] if turn["action"] for value in turn["action"]["logprobs"]]
            unlikely[row["episode_id"]] = sum(value < -1 for value in logprobs)
    if not unlikely:
        raise SystemExit("no episode of the run was continued by another worker: kill one while it has some")
    return max(unlikely, key=lambda name: unlikely[name])


def draw_episode(browser: Any, url: str, episode: str, file: Path) -> None:
    """The head of an episode and its turns."""
    page = browser.new_page(viewport={"width": 1100, "height": 1600}, color_scheme="light")
    page.goto(f"{url}#/episode/{episode}")
    page.locator(".takeover").wait_for()
    page.wait_for_timeout(500)
    page.locator("section[aria-label=Transcript]").screenshot(path=str(file))
    page.close()


def shrink(folder: Path) -> None:
    """256 colours are enough for a page and a terminal."""
    from PIL import Image

    for file in folder.glob("*.png"):
        with Image.open(file) as image:
            small = image.convert("RGB").quantize(256)
        small.save(file, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--readme", action="store_true")
    given = parser.parse_args()
    draw_all(given.run, given.folder, for_readme=given.readme)
