"""An environment of PettingZoo: each agent is a seat. Parallel environments, too, are played by the turns of its AEC interface,
where nobody sees what others do in the same step.

A task's ``config``: ``id`` (instead of the one in ``pettingzoo:FAMILY/NAME``) and ``kwargs`` for the environment's constructor.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from typing import Any

import anyio
import gymnasium
import numpy as np

from fleetbus.errors import UserError
from fleetbus_schemas import Action, ChatMessage, Task
from fleetbus_schemas.seat import MAX_SEATS
from fleetbus_workers.environment.adapter_context import AdapterContext, Factory
from fleetbus_workers.environment.adapters.common.action_text import extract_action
from fleetbus_workers.environment.adapters.common.legal_moves import TRIES, find_move, list_moves, refuse
from fleetbus_workers.environment.adapters.common.task_seed import find_seed
from fleetbus_workers.environment.adapters.gymnasium.text import strip_ansi_codes
from fleetbus_workers.environment.base import EnvironmentFailed, Start, Step, Verdict
from fleetbus_workers.environment.images.observation import StoreImage, encode_image_file, insert_images
from fleetbus_workers.environment.task_permissions import check_arguments

PENALTY = -1.0
"""For the seat that named no legal move: what PettingZoo's own wrapper of its classic games pays for an illegal one."""

MOVES = {
    "rps": ("rock", "paper", "scissors"),
    "leduc_holdem": ("call", "raise", "fold", "check"),
    "texas_holdem": ("call", "raise", "fold", "check"),
    "texas_holdem_no_limit": ("fold", "check or call", "raise half the pot", "raise the pot", "all in"),
}
"""Names of moves, in the order of their numbers, where PettingZoo's documentation has them and its code does not."""

_ID = re.compile(r"[a-z]+/[a-z0-9_]+_v\d+")
_PLACEHOLDER = "<frame>"


def build(context: AdapterContext) -> Factory:
    """Environments of the spec's id, else of the task's. Raises `UserError` if there is none, or a package that it needs."""
    id, store_image = context.rest, context.store_image
    if id:
        try:
            make(id, {}).close()
        except ValueError as error:
            raise UserError(f"environment {context.spec!r}: {error}") from error
    return Factory(lambda: PettingZooEnvironment(id, store_image))


def make(id: str, arguments: dict[str, Any]) -> Any:
    """The AEC environment ``FAMILY/NAME``. Raises `ValueError`."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # it would greet on standard output
    if not _ID.fullmatch(id):
        raise ValueError(f"{id[:80]!r} is not written as FAMILY/NAME, as in classic/tictactoe_v3")
    try:
        module = importlib.import_module(f"pettingzoo.{id.replace('/', '.')}")
        modes = module.raw_env.metadata.get("render_modes", ()) if hasattr(module, "raw_env") else ()
        game = module.env(**({"render_mode": "ansi"} if "ansi" in modes else {}), **arguments)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pettingzoo"):
            raise ValueError(f"PettingZoo has no environment {id!r}") from error
        raise ValueError(f"{id} needs {error.name}: pip install it") from error
    except (ImportError, AttributeError, TypeError, AssertionError) as error:
        raise ValueError(f"PettingZoo: {str(error).splitlines()[0][:300] if str(error) else repr(error)}") from error
    if len(game.possible_agents) > MAX_SEATS:
        raise ValueError(f"{id} has {len(game.possible_agents)} agents; an episode has at most {MAX_SEATS} seats")
    return game


class PettingZooEnvironment:
    """One game. After `TRIES` answers in a row that are no legal move a seat has lost: it gets `PENALTY` more."""

    replayable = True

    def __init__(self, id: str, store_image: StoreImage | None = None) -> None:
        self._id = id
        self._store_image = store_image
        self._game: Any = None
        self._wrong = 0
        self._truncated = False
        self._lost = ""
        self._met: set[str] = set()

    async def open(self, task: Task) -> None:
        self._task = task
        arguments = check_arguments(task.config.get("kwargs", {}), "kwargs")
        self._name = str(task.config.get("id") or self._id)
        try:
            self._game = await anyio.to_thread.run_sync(make, self._name, arguments)
        except ValueError as error:
            raise EnvironmentFailed(str(error)) from error
        self._rewards = dict.fromkeys(self._game.possible_agents, 0.0)

    async def reset(self) -> Start:
        seed = find_seed(self._task)
        await anyio.to_thread.run_sync(lambda: self._game.reset(seed=seed))
        self._advance()
        return Start(messages=(await self._show(),), seat=self._seat(self._agent))

    async def step(self, action: Action) -> Step:
        chosen = self._parse(action.text)
        if chosen is None:
            self._wrong += 1
            if self._wrong < TRIES:
                return Step(messages=(refuse(action.text, TRIES - self._wrong, self._asked()),), tool_errors=1)
            self._lost = f"{self._agent} gave {TRIES} answers that are no legal move"
            self._rewards[self._agent] += PENALTY
            return Step(terminated=True, tool_errors=1)
        self._wrong = 0
        await anyio.to_thread.run_sync(lambda: self._game.step(chosen))
        self._advance()
        if not self._game.agents:
            return Step(terminated=not self._truncated, truncated=self._truncated)
        return Step(messages=(await self._show(),), seat=self._seat(self._agent))

    def _advance(self) -> None:
        """Collect what each agent was rewarded with since its last move, up to the next agent that can move."""
        while self._game.agents:
            self._agent = self._game.agent_selection
            self._seen, reward, terminated, truncated, info = self._game.last()
            self._rewards[self._agent] += float(reward)
            if not (terminated or truncated):
                self._moves = self._list_moves(info)
                return
            self._truncated = bool(truncated and not terminated)
            self._game.step(None)

    def _list_moves(self, info: Any) -> dict[int, str]:
        """Legal moves of a discrete space by number; none of another space."""
        space = self._game.action_space(self._agent)
        if not isinstance(space, gymnasium.spaces.Discrete):
            return {}
        mask = self._seen.get("action_mask") if isinstance(self._seen, dict) else None
        mask = info.get("action_mask") if mask is None else mask
        names = MOVES.get(self._name.partition("/")[2].rpartition("_v")[0], ())
        names = names if len(names) == space.n else tuple(map(str, range(space.start, space.start + space.n)))
        legal = range(space.n) if mask is None else map(int, np.flatnonzero(mask))
        return {int(space.start) + number: names[number] for number in legal}

    def _parse(self, text: str) -> Any:
        """The action that ``text`` names, None if it is not legal."""
        space = self._game.action_space(self._agent)
        if isinstance(space, gymnasium.spaces.Discrete):
            return find_move(text, self._moves)
        try:
            action = np.asarray(json.loads(extract_action(text)), dtype=space.dtype)
        except (ValueError, TypeError, RecursionError, OverflowError):
            return None
        return action if space.contains(action) else None

    def _asked(self) -> str:
        space = self._game.action_space(self._agent)
        return list_moves(self._moves) if self._moves else f"Answer with one action, as JSON for {space}."

    async def _show(self) -> ChatMessage:
        """The text rendering if there is one, else what the agent observes: pixels as an image, or values."""
        seen = self._seen["observation"] if isinstance(self._seen, dict) and "observation" in self._seen else self._seen
        pictures = []
        if self._game.render_mode == "ansi":
            text = strip_ansi_codes(str(self._game.render()))
        elif isinstance(seen, np.ndarray) and seen.dtype == np.uint8 and seen.ndim == 3 and seen.shape[2] == 3:
            text, pictures = _PLACEHOLDER, [encode_image_file(seen)]
        else:
            text = json.dumps(seen, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))
        first = self._agent not in self._met
        self._met.add(self._agent)
        before = (self._task.prompt, f"{self._name.partition('/')[2]}. You are {self._agent}.") if first else ()
        shown = "\n\n".join(filter(None, (*before, text, self._asked())))
        return ChatMessage(role="user", content=await insert_images(shown, pictures, self._store_image, _PLACEHOLDER))

    def _seat(self, agent: str) -> str:
        return agent if len(self._rewards) > 1 else ""

    async def state(self) -> dict[str, Any]:
        return {"id": self._name, "over": not self._game.agents}

    async def verify(self) -> Verdict:
        """The sum of each agent's rewards, with several agents also that of the first; none for a game that is not over."""
        if self._game.agents and not self._lost:
            return Verdict(reward=None, reason="the game was not over")
        seats = self._rewards if len(self._rewards) > 1 else {}
        return Verdict(reward=next(iter(self._rewards.values())), reason=self._lost, seats=dict(seats))

    async def close(self) -> None:
        game, self._game = self._game, None
        if game is not None:
            await anyio.to_thread.run_sync(game.close)
