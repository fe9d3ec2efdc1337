"""Computes verdicts of `bfcl-eval` itself: ``python original_verdicts.py EPISODES``, in its interpreter.

EPISODES is a file, ``[[ID, [ANSWER, ...]], ...]``: an answer is a text, or calls ``[NAME, ARGUMENTS]``; after its answers an
episode is answered with "done". BFCL's own loop plays them, and its own evaluation of an entry, not only its checker, gives the
verdict. Prints a list of 1.0 and 0.0. With ``--reference`` it prints ``{ID: [[CALL, ...], ...]}`` instead: the reference
answers as such calls, turn by turn.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["BFCL_PROJECT_ROOT"] = tempfile.mkdtemp()
CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")


def load() -> dict[str, tuple[dict[str, Any], list[list[str]]]]:
    from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry

    pairs = [pair for each in CATEGORIES for pair in zip(load_dataset_entry(each), load_ground_truth_entry(each), strict=True)]
    return {row["id"]: (row, truth["ground_truth"]) for row, truth in pairs}


def parse_call(text: str, parameters: dict[str, list[str]]) -> list[Any]:
    """A call as a model makes it: values by name."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    arguments = {name: ast.literal_eval(value) for name, value in zip(parameters[call.func.id], call.args, strict=False)}
    return [call.func.id, arguments | {each.arg: ast.literal_eval(each.value) for each in call.keywords}]


def list_reference() -> dict[str, list[list[Any]]]:
    found = {}
    for key, (row, truth) in load().items():
        tools = [*row["function"], *itertools.chain(*row.get("missed_function", {}).values())]
        parameters = {tool["name"]: list(tool["parameters"]["properties"]) for tool in tools}
        found[key] = [[parse_call(each, parameters) for each in turn] for turn in truth]
    return found


def build_responses(answers: list[Any]) -> Iterator[Any]:
    for answer in itertools.chain(answers, itertools.repeat("done")):
        calls = [] if isinstance(answer, str) else answer
        made = [
            SimpleNamespace(id=f"c{n}", function=SimpleNamespace(name=name, arguments=json.dumps(arguments)))
            for n, (name, arguments) in enumerate(calls)
        ]
        message = SimpleNamespace(content=answer if isinstance(answer, str) else "", tool_calls=made or None)
        usage = SimpleNamespace(prompt_tokens=1, completion_tokens=1)
        yield SimpleNamespace(choices=[SimpleNamespace(message=message)], usage=usage)


def import_evaluation() -> Any:
    """Its module of evaluation without the list of all models, which imports every vendor's client."""
    for name, member in {
        "bfcl_eval.constants.model_config": "MODEL_CONFIG_MAPPING",
        "dotenv": "load_dotenv",
        "tqdm": "tqdm",
    }.items():
        stub = ModuleType(name)
        setattr(stub, member, {})
        sys.modules[name] = stub
    helper: Any = ModuleType("bfcl_eval.eval_checker.eval_runner_helper")
    helper.__all__ = []
    sys.modules[helper.__name__] = helper
    from bfcl_eval.eval_checker import eval_runner

    return eval_runner


def judge(number: int, row: dict[str, Any], truth: list[list[str]], answers: list[Any]) -> float:
    from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler

    responses = build_responses(answers)

    class Scripted(OpenAICompletionsHandler):  # type: ignore[misc]
        def _query_FC(self, inference_data: dict[str, Any]) -> Any:
            return next(responses), 0.0

    os.environ["OPENAI_API_KEY"] = "none"
    handler = Scripted(f"m{number}", 0, f"m{number}-FC", True)
    row = json.loads(json.dumps(row))
    result, _ = handler.inference(row, False, True)
    result = json.loads(json.dumps(result))  # as it stands in its file of results
    category = row["id"].rpartition("_")[0]
    found = import_evaluation()._evaluate_single_multi_turn_entry(
        handler, row["id"], result, truth, row, f"m{number}", category
    )
    return float(found["valid"])


def main() -> None:
    if sys.argv[1] == "--reference":
        print(json.dumps(list_reference()))
        return
    tasks = load()
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        verdicts = [
            judge(n, *tasks[key], answers) for n, (key, answers) in enumerate(json.loads(Path(sys.argv[1]).read_text()))
        ]
    print(json.dumps(verdicts))


if __name__ == "__main__":
    main()
