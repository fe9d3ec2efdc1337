"""An agent that hangs up on some of its calls and repeats them as an SDK does; each call says which one it is.

It ends with an error when it is answered anything but what it asked for, or a repetition otherwise than the call before.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import time
from urllib.parse import urlsplit

CALLS = 4
HANGS_UP = 0.4
URL = urlsplit(os.environ["OPENAI_BASE_URL"])
HEADERS = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}


def post(path: str, body: bytes, **headers: str) -> bytes:
    connection = http.client.HTTPConnection(URL.hostname or "", URL.port, timeout=60)
    connection.request("POST", path, body, HEADERS | headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"answered {answer.status}: {content[:200]!r}")
    return content


def hang_up(path: str, body: bytes, **headers: str) -> None:
    """Send a call, or half of it, and do not wait for its answer."""
    with socket.create_connection((URL.hostname or "", URL.port or 0), timeout=60) as connection:
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {URL.netloc}",
            *(f"{name}: {value}" for name, value in (HEADERS | headers).items()),
        ]
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode()
        connection.sendall(head + body[: len(body) if random.random() < 0.8 else len(body) // 2])
        time.sleep(random.random() * 0.1)


def main() -> None:
    messages: list[dict[str, str]] = []
    for number in range(CALLS):
        messages.append({"role": "user", "content": f"call {number}"})
        body, path = json.dumps({"model": "policy", "messages": messages}).encode(), f"{URL.path}/chat/completions"
        retries = 0
        while random.random() < HANGS_UP and retries < 2:
            hang_up(path, body, **{"x-stainless-retry-count": str(retries)})
            retries += 1
        answers = [post(path, body, **{"x-stainless-retry-count": str(retries)})]
        if random.random() < HANGS_UP:
            answers.append(post(path, body, **{"x-stainless-retry-count": str(retries + 1)}))
        contents = {json.loads(answer)["choices"][0]["message"]["content"] for answer in answers}
        if len(contents) != 1:
            raise SystemExit(f"call {number} was answered twice: {contents}")
        messages.append({"role": "assistant", "content": contents.pop()})
    post(urlsplit(os.environ["FLEETBUS_REWARD_URL"]).path, json.dumps({"reward": 1.0}).encode())


if __name__ == "__main__":
    main()
