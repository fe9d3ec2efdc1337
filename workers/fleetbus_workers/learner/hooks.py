"""Functions of the user's in place of an objective or an advantage estimator, tried on a few numbers before training.

Every fault of one is a `UserError` of one line that names the setting.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from fleetbus.config.settings import AlgorithmSettings
from fleetbus.core.algorithms.objectives import Clip, Objective
from fleetbus.errors import UserError
from fleetbus.user_code import describe_error, load_callable

ROWS, WIDTH = 3, 5


def check_hooks(algorithm: AlgorithmSettings) -> None:
    """Load and try the functions that ``algorithm`` names."""
    if algorithm.loss:
        load_loss(algorithm.loss)
    if algorithm.advantage:
        load_advantage(algorithm.advantage)


@cache
def load_loss(spec: str) -> Objective:
    """``f(logprobs, old_logprobs, advantages, mask, clip)``: losses [B, T] of torch tensors [B, T], as
    `core.algorithms.objectives` has them. Raises `UserError` unless it gives finite losses of that shape, with a finite
    gradient that is not 0 everywhere."""
    import torch

    setting = f"algorithm.loss = {spec}"
    function: Objective = load_callable(setting, spec)
    draw = torch.Generator().manual_seed(0)
    logprobs = (-torch.rand(ROWS, WIDTH, generator=draw)).requires_grad_()
    old = logprobs.detach() + 0.01 * torch.randn(ROWS, WIDTH, generator=draw)
    advantages, mask = torch.randn(ROWS, WIDTH, generator=draw), torch.ones(ROWS, WIDTH)
    mask[0, 3:] = 0.0
    losses = _call(setting, function, logprobs, old, advantages, mask, Clip(low=0.2, high=0.28))
    if not isinstance(losses, torch.Tensor) or losses.shape != logprobs.shape:
        raise UserError(
            f"{setting}: it has to return a tensor of the shape of logprobs, {ROWS} x {WIDTH}, not {_describe(losses)}"
        )
    if not losses.requires_grad:
        raise UserError(f"{setting}: its losses carry no gradient of logprobs; nothing could be learned from them")
    (gradient,) = _call(setting, torch.autograd.grad, (losses * mask).sum(), logprobs)
    for name, values in (("losses", losses), ("gradient", gradient)):
        if not bool(values.isfinite().all()):
            raise UserError(f"{setting}: its {name} of finite numbers are not finite")
    if not bool(gradient.any()):
        raise UserError(f"{setting}: the gradient of its losses is 0 everywhere; nothing could be learned from them")
    return function


@cache
def load_advantage(spec: str) -> Callable[..., Any]:
    """``f(rewards, groups, *, minimum)``: advantages [N] of NumPy arrays [N], as `core.algorithms.advantages` has them. Raises
    `UserError` unless it gives finite numbers of that shape, for one episode too."""
    setting = f"algorithm.advantage = {spec}"
    function: Callable[..., Any] = load_callable(setting, spec)
    for rewards, groups in (([0.0, 1.0, 0.5, 0.5], [0, 0, 1, 1]), ([1.0], [0])):
        given = np.array(rewards)
        found = _call(setting, function, given.copy(), np.array(groups), minimum=2)
        if np.shape(found) != given.shape:
            raise UserError(f"{setting}: it has to return one number per episode, {given.shape}, not {_describe(found)}")
        if not bool(np.isfinite(np.asarray(found, dtype=np.float64)).all()):
            raise UserError(f"{setting}: its advantages of the rewards {rewards} are not finite")
    return function


def _call(setting: str, function: Callable[..., Any], *arguments: object, **named: Any) -> Any:
    try:
        return function(*arguments, **named)
    except Exception as error:  # it is the user's code
        raise UserError(f"{setting}: it fails on a few numbers: {describe_error(error)}") from error


def _describe(value: object) -> str:
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__} of shape {tuple(shape)}" if shape is not None else type(value).__name__
