"""An environment of PettingZoo: each agent is a seat. Parallel environments, too, are played by the turns of its AEC interface;
the agents of one step are asked side by side, and nobody sees what others do in it.

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
from fleetbus_workers.environment.adapters.common.rounds import Rounds
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


def is_parallel(id: str) -> bool:
    """True if all agents move at once."""
    return hasattr(importlib.import_module(f"pettingzoo.{id.replace('/', '.')}"), "parallel_env")


class PettingZooEnvironment:
    """One game. After `TRIES` answers in a row that are no legal move a seat has lost: it gets `PENALTY` more.

    In parallel environments all that are left move at once.
    """

    replayable = True

    def __init__(self, id: str, store_image: StoreImage | None = None) -> None:
        self._id = id
        self._store_image = store_image
        self._game: Any = None
        self._truncated = False
        self._lost = ""
        self._met: set[str] = set()
        self._legal: dict[str, dict[int, str]] = {}
        self._collected: dict[str, float] = {}

    async def open(self, task: Task) -> None:
        self._task = task
        arguments = check_arguments(task.config.get("kwargs", {}), "kwargs")
        self._name = str(task.config.get("id") or self._id)
        try:
            self._game = await anyio.to_thread.run_sync(make, self._name, arguments)
        except ValueError as error:
            raise EnvironmentFailed(str(error)) from error
        self._is_parallel = is_parallel(self._name)
        self._rewards = dict.fromkeys(self._game.possible_agents, 0.0)
        self._rounds = Rounds(seats=len(self._rewards) > 1)

    async def reset(self) -> Start:
        seed = find_seed(self._task)
        await anyio.to_thread.run_sync(lambda: self._game.reset(seed=seed))
        return self._rounds.start(await self._show_round())

    async def step(self, action: Action) -> Step:
        rounds, agent = self._rounds, self._rounds.player
        step = rounds.answer(self._parse(agent, action.text), lambda left: refuse(action.text, left, self._ask(agent)))
        if rounds.loser:
            self._lost = f"{agent} gave {TRIES} answers that are no legal move"
            self._rewards[agent] += PENALTY
        if step is not None:
            return step
        await anyio.to_thread.run_sync(self._play, rounds.chosen)
        shown = await self._show_round()
        return rounds.begin(shown) if shown else Step(terminated=not self._truncated, truncated=self._truncated)

    def _play(self, chosen: dict[str, Any]) -> None:
        for agent, move in chosen.items():
            if agent != self._game.agent_selection:
                raise EnvironmentFailed(f"{self._name} asks {self._game.agent_selection} and not {agent}")
            self._collect(agent)
            self._game.step(move)
            self._collected.pop(agent)

    def _collect(self, agent: str) -> None:
        """Count the rewards since its last move, those of the moves of others in this round included: its own clears them."""
        reward = float(self._game._cumulative_rewards[agent])
        self._rewards[agent] += reward - self._collected.get(agent, 0.0)
        self._collected[agent] = reward

    async def _show_round(self) -> dict[str, ChatMessage]:
        """Collect what each agent was rewarded with since its last move. Returns what each of those sees that move next."""
        while self._game.agents:
            agent = self._game.agent_selection
            _, reward, terminated, truncated, _ = self._game.last()
            if not (terminated or truncated):
                break
            self._rewards[agent] += float(reward)
            self._truncated = bool(truncated and not terminated)
            self._game.step(None)
        else:
            return {}
        shown = {}
        for each in tuple(self._game.agents) if self._is_parallel else (agent,):
            self._collect(each)
            seen = self._game.observe(each)
            self._legal[each] = self._list_moves(each, seen)
            shown[each] = await self._show(each, seen)
        return shown

    def _list_moves(self, agent: str, seen: Any) -> dict[int, str]:
        """Legal moves of a discrete space by number; none of another space."""
        space = self._game.action_space(agent)
        if not isinstance(space, gymnasium.spaces.Discrete):
            return {}
        mask = seen.get("action_mask") if isinstance(seen, dict) else None
        mask = self._game.infos[agent].get("action_mask") if mask is None else mask
        names = MOVES.get(self._name.partition("/")[2].rpartition("_v")[0], ())
        names = names if len(names) == space.n else tuple(map(str, range(space.start, space.start + space.n)))
        legal = range(space.n) if mask is None else map(int, np.flatnonzero(mask))
        return {int(space.start) + number: names[number] for number in legal}

    def _parse(self, agent: str, text: str) -> Any:
        """The action that ``text`` names, None if it is not legal."""
        space = self._game.action_space(agent)
        if isinstance(space, gymnasium.spaces.Discrete):
            return find_move(text, self._legal[agent])
        try:
            action = np.asarray(json.loads(extract_action(text)), dtype=space.dtype)
        except (ValueError, TypeError, RecursionError, OverflowError):
            return None
        return action if space.contains(action) else None

    def _ask(self, agent: str) -> str:
        legal = self._legal[agent]
        return list_moves(legal) if legal else f"Answer with one action, as JSON for {self._game.action_space(agent)}."

    async def _show(self, agent: str, seen: Any) -> ChatMessage:
        """The text rendering if there is one, else what the agent observes: pixels as an image, or values."""
        seen = seen["observation"] if isinstance(seen, dict) and "observation" in seen else seen
        pictures = []
        if self._game.render_mode == "ansi":
            text = strip_ansi_codes(str(self._game.render()))
        elif isinstance(seen, np.ndarray) and seen.dtype == np.uint8 and seen.ndim == 3 and seen.shape[2] == 3:
            text, pictures = _PLACEHOLDER, [encode_image_file(seen)]
        else:
            text = json.dumps(seen, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))
        first = agent not in self._met
        self._met.add(agent)
        before = (self._task.prompt, f"{self._name.partition('/')[2]}. You are {agent}.") if first else ()
        shown = "\n\n".join(filter(None, (*before, text, self._ask(agent))))
        return ChatMessage(role="user", content=await insert_images(shown, pictures, self._store_image, _PLACEHOLDER))

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
