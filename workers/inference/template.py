"""The chat template of a Hugging Face tokenizer folder, delta by delta: each message becomes ids once and never again.

Above it is the inference worker; below are transformers and tokenizers, imported only here and only when a folder is opened.
What an assistant's turn is followed by is read from the template itself: a small conversation with the new messages at its
end is rendered, and everything after the assistant's words is the delta. The words themselves are always the sampled ids:
a template that leaves out earlier reasoning when it renders a history anew does not shorten what was sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fleetbus.errors import UserError
from schemas import ChatMessage, Text, ToolSpec

MAX_CACHED_DELTAS = 512
"""Rendered and tokenised texts kept per template: groups share their prompts, episodes many of their observations."""

MAX_CACHED_CHARACTERS = 8192
"""Longer texts are tokenised anew each time, which bounds the memory of the cache."""

_ANSWER = "Fleetbusanswer"
_BASE = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER})


class ChatTemplate:
    """`Template` for any folder with a tokenizer and a chat template. Raises `UserError` if it has none, or if the template
    rewrites earlier turns, so that no history could grow by appending. ``template_tools`` hands the tools to the template;
    by default the environment's own messages describe them. Special tokens within message contents are broken by a
    zero-width space, so that no observation can end a turn or begin one."""

    stop_ids: frozenset[int]

    def __init__(self, folder: Path, *, template_tools: bool = False) -> None:
        self._folder = folder
        self._template_tools = template_tools
        self._tokenizer = _open_tokenizer(folder)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self._encode_text = _plain_encoder(self._tokenizer, backend)
        self._decode_ids: Callable[..., str] = (backend or self._tokenizer).decode
        self._added = {str(token): token.special for token in self._tokenizer.added_tokens_decoder.values()}
        self._control = re.compile("|".join(re.escape(token) for token, special in self._added.items() if special) or "(?!)")
        self._turn_end = self._find_turn_end()
        self._turn_end_id = self._encode_text(self._turn_end)[0]
        self.stop_ids = frozenset({self._turn_end_id, *_end_ids(folder, self._tokenizer)})
        self._check_appending()
        self._cached_ids = lru_cache(MAX_CACHED_DELTAS)(self._ids)
        self._cached_delta = lru_cache(MAX_CACHED_DELTAS)(self._delta)

    def begin(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        """Ids of the whole prompt of turn 0, ending where the assistant begins. Raises `UserError` if the template refuses."""
        described = [_described(tool) for tool in tools] if self._template_tools and tools else None
        text = self._render([self._plain(message) for message in messages], tools=described)
        return list(self._cached_ids(text) if len(text) <= MAX_CACHED_CHARACTERS else self._ids(text))

    def proceed(self, last_sampled: Sequence[int], messages: Sequence[ChatMessage]) -> list[int]:
        """Ids between the last sampled token and the assistant's next turn. Raises `UserError` if the template refuses."""
        short = sum(len(message.content) for message in messages) <= MAX_CACHED_CHARACTERS
        delta = (self._cached_delta if short else self._delta)(tuple(messages))
        ended = bool(last_sampled) and last_sampled[-1] == self._turn_end_id
        return list(delta[1:] if ended else delta)

    def text(self, ids: Sequence[int]) -> str:
        """The sampled ids as text, without a final end-of-turn token; every other token stays."""
        ended = bool(ids) and ids[-1] in self.stop_ids
        return self._decode_ids(list(ids[:-1] if ended else ids), skip_special_tokens=False)

    def ids_of(self, token: str) -> int | None:
        """The id of a token by its string, None if the vocabulary has no such single token."""
        ids = self._encode_text(token)
        return ids[0] if len(ids) == 1 else None

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._encode_text(text))

    def _delta(self, messages: tuple[ChatMessage, ...]) -> tuple[int, ...]:
        """From the end-of-turn token on, which is tokenised along: some tokenizers treat the start of a text differently."""
        following = self._following([self._plain(message) for message in messages])
        return tuple(self._encode_text(following[following.index(self._turn_end) :]))

    def _following(self, messages: list[dict[str, str]]) -> str:
        """What the template writes after an assistant's words when ``messages`` follow, up to the assistant's next words."""
        _, found, following = self._render([*_BASE, *messages]).partition(_ANSWER)
        if not found:
            raise UserError(f"{self._folder}: the chat template does not repeat what the assistant said")
        return following

    def _plain(self, message: ChatMessage) -> dict[str, str]:
        content = message.content if isinstance(message.content, str) else self._joined(message.content)
        content = self._control.sub(lambda found: f"{found[0][0]}\u200b{found[0][1:]}", content)
        return {"role": message.role, "content": content}

    def _joined(self, parts: Sequence[object]) -> str:
        texts = [part.text for part in parts if isinstance(part, Text)]
        if len(texts) < len(parts):
            raise UserError(f"{self._folder}: this model reads text only, and a message has an image")
        return "".join(texts)

    def _render(self, messages: list[dict[str, str]], tools: list[dict[str, Any]] | None = None) -> str:
        from jinja2 import TemplateError

        try:
            rendered: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(f"{self._folder}: the chat template refuses messages of roles {roles}: {error}") from error
        return rendered

    def _find_turn_end(self) -> str:
        following = self._following([{"role": "user", "content": "Hello"}]).lstrip()
        ends = [token for token in self._added if following.startswith(token)]
        if not ends:
            raise UserError(f"{self._folder}: the chat template ends an assistant's turn with no token of the vocabulary")
        return max(ends, key=len)

    def _check_appending(self) -> None:
        """Compare a conversation of three turns, appended turn by turn, with the template's own rendering of the whole."""
        system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "And then?"}
        openings = [[_BASE[0]]]
        if self._accepts([system, _BASE[0]]):
            openings.append([system, _BASE[0]])
        for opening in openings:
            appended = self._render(opening) + 2 * (_ANSWER + self._following([question]))
            if self._render([*opening, _BASE[1], question, _BASE[1], question]) != appended:
                raise UserError(
                    f"{self._folder}: the chat template rewrites earlier turns when later ones are added; "
                    "put a chat_template.jinja that only appends into the folder"
                )

    def _accepts(self, messages: list[dict[str, str]]) -> bool:
        try:
            self._render(messages)
        except UserError:
            return False
        return True


def _open_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: no tokenizer can be loaded: {str(error).splitlines()[0]}") from error
    if tokenizer.chat_template is None:
        raise UserError(f"{folder}: the tokenizer has no chat template; put a chat_template.jinja into the folder")
    return tokenizer


def _plain_encoder(tokenizer: Any, backend: Any) -> Callable[[str], list[int]]:
    """Text to ids without beginning-of-text tokens, which the template writes itself; straight to the Rust code if it can."""
    if backend is None:
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)


def _end_ids(folder: Path, tokenizer: Any) -> set[int]:
    """The ids that the folder declares as ends: the tokenizer's own and those of its generation settings."""
    file = folder / "generation_config.json"
    declared = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
    ends = declared if isinstance(declared, list) else [declared]
    return {end for end in (tokenizer.eos_token_id, *ends) if end is not None}


def _described(tool: ToolSpec) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
