"""Finds verifiers whose verdict the policy can forge, by what their code does. Pure: the code is parsed, never run.

It warns of patterns and proves nothing: a verifier without a warning may still believe what it should not.
"""

import ast
from collections.abc import Iterator

RUNS_HERE = (
    "runs code in the grader's own process, where that code can return the verdict itself; run the policy's code with "
    'env.call_tool("python_call", ...) and compare the values'
)
TRUSTS_EPISODE = (
    "reads what the episode's interpreter printed or its exit code, which the policy's code can make up; run the code with "
    'env.call_tool("python_call", ...) and compare the values'
)
TRUSTS_SHARED = (
    "runs code of the policy and its tests in one interpreter, so the code can print what the tests would or exit before them; "
    'use env.call_tool("python_call", ...) and compare the values'
)
PRINTS_REWARD = (
    'prints a partial reward, which text of the policy that is printed can imitate; return {"score": ..., "partial": ...}'
)
_EXECUTING = {"exec", "eval", "compile", "__import__"}
_MODULES = {"subprocess", "runpy", "importlib", "pickle", "marshal", "dill", "cloudpickle", "code", "multiprocessing"}
_SYSTEM = {"system", "popen", "execv", "execve", "execvp", "posix_spawn"}
_MARKS = ("SUCCESS_ACCUMULATOR", "ERROR_ACCUMULATOR")


def find_forgeable(code: str) -> list[str]:
    """One line for each way in which ``code`` trusts the policy, with the number of its first line; empty for no Python."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found: dict[str, int] = {}
    for warning, line in _find_warnings(tree):
        found[warning] = min(line, found.get(warning, line))
    return [f"line {line}: {warning}" for warning, line in sorted(found.items(), key=lambda item: item[1])]


def _find_warnings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    constants = _find_constants(tree)
    ignored = {id(_unwrap(node.value)) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if any(name.partition(".")[0] in _MODULES for name in names):
                yield RUNS_HERE, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and any(mark in node.value for mark in _MARKS):
            yield PRINTS_REWARD, node.lineno
        elif isinstance(node, ast.Call):
            if _runs_code(node, constants):
                yield RUNS_HERE, node.lineno
            elif id(node) not in ignored:
                yield from ((warning, node.lineno) for warning in _find_trust(node, constants))


def _runs_code(call: ast.Call, constants: set[str]) -> bool:
    if isinstance(call.func, ast.Attribute):
        owner = call.func.value
        return isinstance(owner, ast.Name) and owner.id == "os" and call.func.attr in _SYSTEM
    if not isinstance(call.func, ast.Name) or call.func.id not in _EXECUTING:
        return False
    return not call.args or not _is_constant(call.args[0], constants)


def _find_trust(call: ast.Call, constants: set[str]) -> Iterator[str]:
    """Warn if a call of a tool returns what an interpreter with code of the policy reports of itself."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "call_tool":
        return
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    name = call.args[0] if call.args else given.get("name")
    arguments = call.args[1] if len(call.args) > 1 else given.get("arguments")
    if not isinstance(name, ast.Constant):
        return
    if name.value == "python":
        yield TRUSTS_EPISODE
    elif name.value == "python_fresh":
        values = dict(zip(arguments.keys, arguments.values, strict=True)) if isinstance(arguments, ast.Dict) else {}
        code = next((value for key, value in values.items() if isinstance(key, ast.Constant) and key.value == "code"), None)
        if code is None or not _is_constant(code, constants):
            yield TRUSTS_SHARED


def _find_constants(tree: ast.Module) -> set[str]:
    """Names that are assigned once in the whole code, to a text."""
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    parameters = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    texts = {
        node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant)
    }
    names = [node.id for node in assigned]
    return {name for name in texts if names.count(name) == 1} - parameters


def _is_constant(node: ast.expr, constants: set[str]) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id in constants)


def _unwrap(node: ast.expr) -> ast.expr:
    return node.value if isinstance(node, ast.Await) else node
