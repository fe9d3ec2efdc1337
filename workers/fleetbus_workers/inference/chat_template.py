"""The chat template of a Hugging Face tokenizer folder, delta by delta: each message becomes ids once and never again.

Above it is the inference worker; below are transformers and tokenizers, imported only here and only when a folder is opened.
What an assistant's turn is followed by is read from the template itself: a small conversation with the new messages at its
end is rendered, and everything after the assistant's words is the delta. The words themselves are always the sampled ids, so
the history is exact: a template that drops earlier reasoning when it renders a history again, or that opens a thought only for
the turn to come, does not change what was sampled and what it was sampled after. See docs/decisions/0061.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.core.text.tool_formats import HERMES, ParsedResponse, number_calls, parse_response
from fleetbus.errors import UserError
from fleetbus_schemas import ChatMessage, SegmentReason, Text, ToolSpec
from fleetbus_workers.inference.merged_roles import join_contents, list_merges
from fleetbus_workers.inference.rendered_history import find_reason
from fleetbus_workers.inference.tool_support import (
    ToolSupport,
    build_tool_schema,
    find_reasoning_marks,
    prove_tools,
    render_results,
)

MAX_CACHED_DELTAS = 512
"""Rendered and tokenised texts kept per template: groups share their prompts, episodes many of their observations."""

MAX_CACHED_CHARACTERS = 8192
"""Longer texts are tokenised again each time, which bounds the memory of the cache."""

_ANSWER = "Fleetbusanswer"
_THOUGHT = "Fleetbusthought"
_BASE = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER})


class ChatTemplate:
    """`Template` for any folder with a tokenizer and a chat template. Raises `UserError` if it has none, or if the template
    rewrites earlier turns, so that no history could grow by appending. Tools that come with a prompt are for the template to
    describe (see `tools`); otherwise the environment's own messages do. Special tokens within message contents are broken by a
    zero-width space, so that no observation can end a turn or begin one.

    ``drops_reasoning`` says that the template leaves earlier reasoning out; with ``reasoning`` "refuse" such a model is
    refused, with "keep" the history keeps what was sampled, with "template" ``renders_history`` says that each turn's prompt is
    `encode_conversation` of all before it. ``thinking`` is passed to templates that use
    ``enable_thinking``. ``turn_end`` is the id that ends an assistant's turn."""

    stop_ids: frozenset[int]

    def __init__(self, folder: Path, *, reasoning: str = "keep", thinking: bool | None = None) -> None:
        self._folder = folder
        self._template_options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        self._tokenizer = _open_tokenizer(folder)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self._encode_text = _build_encoder(self._tokenizer, backend)
        self._decode_ids: Callable[..., str] = (backend or self._tokenizer).decode
        self._joins_system = False
        self._added = {str(token): token.special for token in self._tokenizer.added_tokens_decoder.values()}
        self._control = re.compile("|".join(re.escape(token) for token, special in self._added.items() if special) or "(?!)")
        self._turn_end = self._find_turn_end()
        self._turn_end_id = self._encode_text(self._turn_end)[0]
        self._ends = _read_end_ids(folder, self._tokenizer)
        self.stop_ids = frozenset({self._turn_end_id, *self._ends})
        self.turn_end = self._turn_end_id
        self._check_append_only()
        self._tools = self._prove_tools()
        self.drops_reasoning = self._detect_dropped_reasoning()
        if self.drops_reasoning and reasoning == "refuse":
            raise UserError(
                f"{folder}: the chat template drops earlier reasoning, but the history keeps it: allow this with "
                "--inference-reasoning keep, or put a chat_template.jinja that keeps it into the folder"
            )
        self.renders_history = reasoning == "template"
        self._cached_ids = lru_cache(MAX_CACHED_DELTAS)(self._encode_ids)
        self._cached_delta = lru_cache(MAX_CACHED_DELTAS)(self._encode_delta)

    @property
    def tools(self) -> ToolSupport:
        """The template's support of tools, proved. Raises `UserError` if it cannot do what it takes to use them."""
        if isinstance(self._tools, UserError):
            raise UserError(
                f"{self._folder}: {self._tools}: set environment.prompt = fleet or compact, which describe tools in words"
            )
        return self._tools

    def _prove_tools(self) -> ToolSupport | UserError:
        try:
            support = prove_tools(
                self._render,
                turn_end=self._turn_end,
                ends=[self.decode([end]) for end in sorted(self._ends)],
                special=[token for token, special in self._added.items() if special],
            )
        except UserError as error:
            return error
        self.stop_ids |= {self._encode_text(support.call_end)[0]}
        return support

    @cached_property
    def reasoning_marks(self) -> tuple[str, str] | None:
        """The marks around the model's reasoning, None if its template knows of none."""
        return find_reasoning_marks(str(self._tokenizer.chat_template))

    def parse_text(self, text: str, tools: Sequence[ToolSpec], *, calls_before: int = 0) -> ParsedResponse:
        """See `Template.parse_text`. Without ``tools`` the environment's own messages asked for the format that is read."""
        if not tools:
            return parse_response(text, HERMES)
        support, marks = self.tools, self.reasoning_marks
        if marks is not None and self._opening.rstrip().endswith(marks[0]):
            text = marks[0] + text
        parsed = number_calls(parse_response(text, support.format, tools, reasoning=marks), support.format, calls_before)
        if support.parallel or len(parsed.calls) < 2:
            return parsed
        error = f"{len(parsed.calls) - 1} further tool calls not executed: one per message"
        return msgspec.structs.replace(parsed, calls=parsed.calls[:1], errors=(*parsed.errors, error))

    def encode_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        """Ids of the whole prompt of turn 0, ending where the assistant begins. Raises `UserError` if the template refuses."""
        if tools:
            _ = self.tools
        plain = [self._convert_message(message) for message in messages]
        text = self._render_merged(plain, [build_tool_schema(tool) for tool in tools] or None)
        return list(self._cached_ids(text) if len(text) <= MAX_CACHED_CHARACTERS else self._encode_ids(text))

    def encode_continuation(self, last_sampled: Sequence[int], messages: Sequence[ChatMessage]) -> list[int]:
        """Ids between the last sampled token and the assistant's next turn. Results of tools with a ``tool_call_id`` come first
        among ``messages``. Raises `UserError` if the template refuses."""
        short = sum(map(_count_characters, messages)) <= MAX_CACHED_CHARACTERS
        delta = (self._cached_delta if short else self._encode_delta)(tuple(messages))
        ended = bool(last_sampled) and last_sampled[-1] == delta[0]
        return list(delta[1:] if ended else delta)

    def encode_conversation(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        """Ids of a whole conversation, ending where the assistant begins, as the template itself writes it: an assistant's
        message is the text that was sampled, of which the template leaves out what it leaves out. Raises `UserError` if the
        template refuses."""
        plain = [
            {"role": "assistant", "content": message.content} if message.role == "assistant" else self._convert_message(message)
            for message in messages
        ]
        schemas = [build_tool_schema(tool) for tool in tools] if tools and self.tools else None
        return list(self._encode_ids(self._render_merged(plain, schemas)))

    def explain_rendering(self, conversation: Sequence[ChatMessage], rendered: Sequence[int]) -> SegmentReason:
        """The reason why `encode_conversation` does not begin with what was sampled."""
        return find_reason(conversation, self.decode(rendered), self.reasoning_marks)

    def decode_text(self, ids: Sequence[int]) -> str:
        """The sampled ids as text, without a final end-of-turn token; every other token stays."""
        ended = bool(ids) and ids[-1] in self.stop_ids
        return self._decode_ids(list(ids[:-1] if ended else ids), skip_special_tokens=False)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its string, None if the vocabulary has no such single token."""
        ids = self._encode_text(token)
        return ids[0] if len(ids) == 1 else None

    def encode(self, text: str) -> list[int]:
        """Any text as ids, without tokens for its beginning or end."""
        return list(self._encode_text(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Any ids as text, special tokens included."""
        return self._decode_ids(list(ids), skip_special_tokens=False)

    def _encode_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._encode_text(text))

    def _encode_delta(self, messages: tuple[ChatMessage, ...]) -> tuple[int, ...]:
        """From the end-of-turn token on, which is tokenised along: some tokenizers treat the start of a text differently."""
        plain = [self._convert_message(message) for message in messages]
        results = list(takewhile(lambda message: message.get("tool_call_id"), plain))
        if results:
            following = render_results(self._render_merged, self.tools, results, plain[len(results) :])
            return tuple(self._encode_text(following))
        following = self._render_following(plain)
        return tuple(self._encode_text(following[following.index(self._turn_end) :]))

    def _render_following(self, messages: list[dict[str, Any]]) -> str:
        """Render ``messages`` after an assistant's words, as the template does, up to the assistant's next words."""
        _, found, following = self._render_merged([*_BASE, *messages]).partition(_ANSWER)
        if not found:
            raise UserError(f"{self._folder}: the chat template does not repeat the assistant's text")
        return following

    def _convert_message(self, message: ChatMessage) -> dict[str, Any]:
        content = message.content if isinstance(message.content, str) else self._join_text(message.content)
        return {"role": message.role, "content": self._escape_special_tokens(content), **self._convert_reference(message)}

    def _convert_reference(self, message: ChatMessage) -> dict[str, str]:
        """The call that a result is of; both may be the policy's own words."""
        named = {"tool_call_id": message.tool_call_id, "name": message.name}
        return {key: self._escape_special_tokens(value) for key, value in named.items() if value}

    def _escape_special_tokens(self, text: str) -> str:
        """The text without special tokens."""
        return self._control.sub(lambda found: f"{found[0][0]}\u200b{found[0][1:]}", text)

    def _join_text(self, parts: Sequence[object]) -> str:
        texts = [part.text for part in parts if isinstance(part, Text)]
        if len(texts) < len(parts):
            raise UserError(f"{self._folder}: this model reads text only, and a message has an image")
        return "".join(texts)

    def _render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, object]] | None = None) -> str:
        from jinja2 import TemplateError

        try:
            rendered: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **self._template_options
            )
        except (TemplateError, TypeError, ValueError) as error:  # a template may add a text to what is none
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(f"{self._folder}: the chat template refuses messages of roles {roles}: {error}") from error
        return rendered

    def _render_merged(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, object]] | None = None) -> str:
        """The same, with neighbours merged if the template refuses them; see `list_merges`."""
        try:
            return self._render(self._place_system(messages), tools)
        except UserError as refused:
            for merged in list_merges(messages):
                try:
                    return self._render(self._place_system(merged), tools)
                except UserError:  # it may take what is merged further
                    continue
            raise refused

    def _place_system(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        return _merge_system_message(messages) if self._joins_system else messages

    def _find_turn_end(self) -> str:
        following = self._render_following([{"role": "user", "content": "Hello"}]).lstrip()
        ends = [token for token in self._added if following.startswith(token)]
        if not ends:
            raise UserError(f"{self._folder}: the chat template ends an assistant's turn with no token of the vocabulary")
        return max(ends, key=len)

    def _check_append_only(self) -> None:
        """Compare a conversation of three turns, appended turn by turn, with the template's own rendering of the whole.

        A system message that the template moves to the newest turn (Mistral's does) is joined to the first user message
        instead, which is where the template itself puts it on turn 0.
        """
        system = {"role": "system", "content": "Be brief."}
        self._check_opening([_BASE[0]])
        if self._accepts([system, _BASE[0]]):
            try:
                self._check_opening([system, _BASE[0]])
            except UserError:
                if self._render(_merge_system_message([system, _BASE[0]])) != self._render([system, _BASE[0]]):
                    raise
                self._joins_system = True
        else:
            self._joins_system = True

    def _check_opening(self, opening: list[dict[str, Any]]) -> None:
        """A turn to come may open with more than a past one shows (``<think>``), a past one with what the model samples itself
        (a space, an empty thought); but always with the same."""
        question = {"role": "user", "content": "And then?"}
        self._opening = self._render(opening)
        whole = self._render([*opening, _BASE[1], question, _BASE[1], question])
        following = self._render_following([question])
        place, openers = 0, set()
        for piece in (self._opening, following):
            end = whole.find(_ANSWER, place)
            shown = self._count_shared(piece, whole[place:end])
            openers.add((piece[shown:], whole[place + shown : end]))
            place = end + len(_ANSWER)
        sampled = "".join(opener[1] for opener in openers)
        for token in self._added:
            sampled = sampled.replace(token, "")
        if len(openers) > 1 or sampled.strip() or whole[place:] != following:
            raise UserError(
                f"{self._folder}: the chat template rewrites earlier turns when later ones are added; "
                "put a chat_template.jinja that only appends into the folder"
            )

    def _count_shared(self, one: str, other: str) -> int:
        """Number of characters that both begin with, in whole tokens."""
        pieces = re.compile("|".join([*map(re.escape, sorted(self._added, key=len, reverse=True)), "."]), re.DOTALL)
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(pieces.findall(one), pieces.findall(other), strict=False))
        return sum(len(piece) for piece, _ in shared)

    def _detect_dropped_reasoning(self) -> bool:
        """True if the template leaves the reasoning of earlier turns out."""
        thought = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"}
        return _THOUGHT not in self._render([_BASE[0], thought, _BASE[0]])

    def _accepts(self, messages: list[dict[str, Any]]) -> bool:
        try:
            self._render(messages)
        except UserError:
            return False
        return True


def _count_characters(message: ChatMessage) -> int:
    if isinstance(message.content, str):
        return len(message.content)
    return sum(len(part.text) for part in message.content if isinstance(part, Text))


def _merge_system_message(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """A leading system message as the beginning of the user message after it."""
    if len(messages) < 2 or (messages[0]["role"], messages[1]["role"]) != ("system", "user"):
        return messages
    return [join_contents(messages[0], messages[1]) | {"role": "user"}, *messages[2:]]


def _open_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: no tokenizer can be loaded: {str(error).splitlines()[0]}") from error
    if tokenizer.chat_template is None:
        raise UserError(f"{folder}: the tokenizer has no chat template; put a chat_template.jinja into the folder")
    return tokenizer


def _build_encoder(tokenizer: Any, backend: Any) -> Callable[[str], list[int]]:
    """Text to ids without beginning-of-text tokens, which the template writes itself; straight to the Rust code if it can.
    There one text holds up all of Python, and a batch does not."""
    if backend is None:
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    backend.no_truncation()  # a tokenizer that was trained with keeps in its file what it cut texts to
    backend.no_padding()

    def encode(text: str) -> list[int]:
        if len(text) <= MAX_CACHED_CHARACTERS:
            return list(backend.encode(text, add_special_tokens=False).ids)
        return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    return encode


def _read_end_ids(folder: Path, tokenizer: Any) -> set[int]:
    """The ids that the folder declares as ends: the tokenizer's own and those of its generation settings."""
    file = folder / "generation_config.json"
    declared = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
    ends = declared if isinstance(declared, list) else [declared]
    return {end for end in (tokenizer.eos_token_id, *ends) if end is not None}
