"""Multi-turn tasks of the Berkeley Function Calling Leaderboard, from ``bfcl-eval``: its data, tools, state and verdict.

BFCL's own loop for models that call functions asks the endpoint at ``base_url`` turn after turn, its own classes run the calls,
and its own checker gives 1 or 0. BFCL evaluates what the policy wrote as Python: only calls of tools get that far, and each
episode has a process of its own. See docs/decisions/0247-bfcl-plays-its-own-loop.md.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import hashlib
import os
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fleetbus_process import EpisodeFailed, call_in_process, prepare_server

PACKAGE, TRIED = "bfcl-eval", "2026.3.23"
INSTALL = (
    f"-m pip install --no-deps {PACKAGE}=={TRIED} "
    "tree-sitter==0.21.3 tree-sitter-java==0.21.0 tree-sitter-javascript==0.21.4 && "
    "{0} -m pip install openai mpmath filelock tenacity overrides"
)
"""What its multi-turn part imports; all that the package asks for is some gigabytes, and its pin of numpy collides."""

FOLDERS = ("data/multi_turn_func_doc", "eval_checker/multi_turn_eval")
SPLITS = ("train", "held_out")
EVERY = 5
"""Of the scenarios, which have the same number in all categories, each fifth is held out: 4, 9, 14, ..."""

NO_CALL = "no_such_tool()"
"""In the place of what is no call of a tool: BFCL answers that this is not defined."""

CPU_SECONDS = 120
MEMORY_BYTES = 4 << 30
"""Of one episode's process: arithmetic that the policy asks for may have no end, and numbers of any length."""


class NotInstalled(Exception):
    """The interpreter lacks the package, or something that it imports."""


@asynccontextmanager
async def open_environment(name: str, arguments: dict[str, Any]) -> AsyncIterator[Bfcl]:
    """The tasks of a category, ``multi_turn_base``, or of all of them, ``multi_turn``; ``split=train`` or ``held_out`` leaves
    those of one side. Raises `NotInstalled`, and `ValueError` for a name or an argument that is none."""
    os.environ["BFCL_PROJECT_ROOT"] = os.getcwd()  # it makes folders when it is imported, else in the package's
    try:
        from bfcl_eval.constants.category_mapping import TEST_COLLECTION_MAPPING
        from bfcl_eval.model_handler.api_inference import openai_completion  # noqa: F401  # all that an episode imports
    except ImportError as error:
        raise NotInstalled(f"{error}; install it with: {sys.executable} {INSTALL.format(sys.executable)}") from None
    categories = TEST_COLLECTION_MAPPING["multi_turn"]
    if name not in (*categories, "multi_turn"):
        raise ValueError(f"no multi-turn category {name!r}; there are multi_turn for all, {', '.join(categories)}")
    split = arguments.pop("split", "")
    if arguments or split not in ("", *SPLITS):
        raise ValueError(f"the only argument is split={' or split='.join(SPLITS)}")
    yield Bfcl(categories if name == "multi_turn" else [name], split)


class Bfcl:
    """Tasks by their id in the package. ``source`` is the package, its version, and the digest of data and checker."""

    def __init__(self, categories: list[str], split: str) -> None:
        from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry

        rows = [row for each in categories for row in load_dataset_entry(each)]
        truths = [row["ground_truth"] for each in categories for row in load_ground_truth_entry(each)]
        self._tasks = {
            row["id"]: (row, truth) for row, truth in zip(rows, truths, strict=True) if split in ("", side(row["id"]))
        }
        self.source = {"package": PACKAGE, "version": version(PACKAGE), "digest": compute_digest()}
        self._server = prepare_server(["bfcl_eval.model_handler.api_inference.openai_completion"])

    def list_tasks(self, count: int) -> list[dict[str, Any]]:
        return [
            {
                "key": key,
                "env": key.rpartition("_")[0],
                "prompt": "\n".join(message["content"] for turn in row["question"] for message in turn),
                "config": {"id": key, "digest": self.source["digest"]},
            }
            for key, (row, _) in list(self._tasks.items())[:count]
        ]

    async def play(self, task: dict[str, Any], base_url: str) -> dict[str, Any]:
        key, digest = task["config"]["id"], task["config"].get("digest", self.source["digest"])
        if digest != self.source["digest"]:
            raise EpisodeFailed(
                f"the task is of {digest}, and {PACKAGE} {self.source['version']} here of {self.source['digest']}"
            )
        if key not in self._tasks:
            raise EpisodeFailed(f"no task {key!r} here")
        return await call_in_process(self._server, play_entry, *self._tasks[key], base_url)  # type: ignore[no-any-return]


def side(key: str) -> str:
    return SPLITS[int(key.rpartition("_")[2]) % EVERY == EVERY - 1]


def compute_digest() -> str:
    """Of all that decides about a verdict: tasks, answers, tools, their code and the checker's."""
    import bfcl_eval

    place = Path(bfcl_eval.__file__).parent
    files = [file for folder in FOLDERS for file in (place / folder).rglob("*") if file.suffix in (".json", ".py")]
    digest = hashlib.sha256()
    for file in sorted([*files, *place.glob("data/*multi_turn*.json"), *place.glob("data/possible_answer/*multi_turn*.json")]):
        digest.update(f"{file.relative_to(place)}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return f"sha256:{digest.hexdigest()[:16]}"


def play_entry(entry: dict[str, Any], truth: list[list[str]], base_url: str) -> dict[str, Any]:
    """The verdict on an episode with the policy at an address, and BFCL's name of its error."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    handler = build_handler(base_url)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        result, _ = handler.inference(entry, False, True)
        verdict = judge(handler, entry, truth, result)
    return {"reward": float(verdict["valid"]), "reason": verdict.get("error_type", "")}


def judge(handler: Any, entry: dict[str, Any], truth: list[list[str]], result: list[list[Any]]) -> dict[str, Any]:
    """As BFCL's evaluation does before it asks the checker, which imports every vendor's client."""
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    if len(result) != len(truth):
        return {"valid": False, "error_type": "multi_turn:force_terminated"}
    decoded: list[list[list[str]]] = [[] for _ in result]
    for turn, answers in zip(decoded, result, strict=True):
        for each in answers:
            with contextlib.suppress(Exception):  # what cannot be read was no call
                turn += filter(None, [handler.decode_execute(each, False)])
    return multi_turn_checker(decoded, truth, entry, entry["id"].rpartition("_")[0], handler.model_name)  # type: ignore[no-any-return]


def build_handler(base_url: str) -> Any:
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
    from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler

    class Policy(OpenAICompletionsHandler):  # type: ignore[misc]
        """Asks the endpoint once per step, for as long as the answer takes."""

        def _build_client_kwargs(self) -> dict[str, Any]:
            return {"api_key": "in-the-path", "base_url": base_url, "max_retries": 0, "timeout": None}

        def decode_execute(self, result: Any, has_tool_call_tag: bool) -> list[str]:
            decoded: list[str] = super().decode_execute(result, has_tool_call_tag)
            names = [name for call in result for name in call]
            return [text if is_call(text, name) else NO_CALL for name, text in zip(names, decoded, strict=True)]

    reachable = {*dir(builtins), *dir(multi_turn_utils), *multi_turn_utils.execute_multi_turn_func_call.__code__.co_varnames}

    def is_call(text: str, name: str) -> bool:
        """True for one call by that name with plain values, of nothing that is no tool where BFCL evaluates it."""
        try:
            tree = ast.parse(text, mode="eval").body
            assert isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == name and not tree.args
            for keyword in tree.keywords:
                assert keyword.arg is not None
                ast.literal_eval(keyword.value)
        except (AssertionError, SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return False
        return name not in reachable

    return Policy("policy", 0, "policy-FC", True)
