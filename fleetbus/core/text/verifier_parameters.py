"""Parameters of a verifier that nothing is given for, as far as its source tells."""

import ast

GIVEN = ("env", "final_answer", "conversation")
"""What a verifier is given, by these names; its first parameter is ``env`` under any name."""


def find_unknown_parameter(tree: ast.Module, name: str) -> str | None:
    """The first parameter that a call of the function would have no value for, if the code has the name once, in a plain
    ``def``: what decorators and assignments make of a function is known when they run."""
    match [node for node in ast.walk(tree) if name in (getattr(node, field, None) for field in ("name", "asname", "id"))]:
        case [ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]) as function]:
            given = function.args
        case _:
            return None
    needed = [*given.posonlyargs, *given.args]
    needed = needed[: len(needed) - len(given.defaults)]
    if needed and not given.kwarg:
        needed.pop(0)
    needed += [item for item, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    return next((item.arg for item in needed if item.arg not in GIVEN), None)
