"""The starter policy's tokenizer, trained on conversations of the default task: byte-level BPE of about 512 tokens.

Every digit is a token of its own, so that numbers are copied digit by digit. The same seed gives the same files.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fleetbus_schemas import ChatMessage

VOCABULARY_SIZE = 512
PAD = "<|pad|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CONTROL_TOKENS = (PAD, TURN_START, TURN_END)
MARK_TOKENS = ("<tool_call>", "</tool_call>", "<done>")
"""Text that the environment reads: single tokens, but not special ones, so that decoding keeps them."""

CHAT_TEMPLATE = """{%- macro open(role) %}<|im_start|>{{ role }}
{% endmacro %}
{%- if tools %}{{ open('system') }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}Complete the task by calling tools.
# Tools
{% for tool in tools %}{% set said = tool.function %}
{{- {'name': said.name, 'description': said.description, 'parameters': said.parameters} | tojson }}
{% endfor %}# Format
<tool_call>{"name": "tool", "arguments": {...}}</tool_call>
or the final answer followed by <done>.<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{%- if message.role == 'tool' %}{{ open('user') }}{% if not message.content.startswith('Error') %}Tool result:
{% endif %}{{ message.content }}<|im_end|>
{% else %}{{ open(message.role) }}{{ message.content }}
{%- for call in message.tool_calls or [] %}{% set said = call.function -%}
<tool_call>{"name": {{ said.name | tojson }}, "arguments": {{ said.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ open('assistant') }}{% endif %}"""
"""Tools that come with a request, as agents send them, are described and called in the words of `build_compact_system_prompt`:
the same tokens as where the environment describes them."""


def render(messages: Sequence[ChatMessage]) -> str:
    """A conversation as `CHAT_TEMPLATE` renders it."""
    return "".join(f"{TURN_START}{message.role}\n{message.content}{TURN_END}\n" for message in messages)


def train_tokenizer(texts: Iterable[str], *, whole_words: bool = False) -> Any:
    """A `PreTrainedTokenizerFast` trained on rendered conversations, with the chat template. With ``whole_words`` no token has
    letters and something else, so that a word is the same tokens in a question, in quotes and in JSON."""
    tokenizer = Tokenizer(models.BPE())
    split: list[object] = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if whole_words:
        pieces = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"), "isolated")
        split = [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(MARK_TOKENS),
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARK_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of ``text``, straight from the Rust code: the wrapper around it takes ten times as long."""
    return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def encode_with_mask(tokenizer: Any, messages: Sequence[ChatMessage]) -> tuple[list[int], list[bool]]:
    """Ids of a conversation, and which of them the policy says: the words of its turns and the end of each turn."""
    ids: list[int] = []
    mask: list[bool] = []
    for message in messages:
        assistant = message.role == "assistant"
        pieces = (
            (f"{TURN_START}{message.role}\n", False),
            (f"{message.content}{TURN_END}", assistant),
            ("\n", False),
        )
        for text, sampled in pieces:
            new = encode(tokenizer, text)
            ids += new
            mask += [sampled] * len(new)
    return ids, mask
