"""Chat templates of published model families, turn by turn: exact histories, whatever the template does to earlier turns.

The templates below write the published formats (Qwen3, Qwen3-Thinking, Llama 3, Mistral v0.3, ChatML with Qwen2.5's default
system message) in words of our own. FLEETBUS_TEMPLATES may name a folder of ``*.jinja`` files: each is put through the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fleetbus.errors import UserError
from fleetbus_schemas import ChatMessage
from fleetbus_workers.inference.chat_template import ChatTemplate

_QWEN3_TURNS = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' and not m.content.startswith('<tool_response>') %}{% set ns.last = loop.index0 %}
{%- endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role in ('user', 'system') %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set words = m.content.split('</think>')[-1].lstrip('\n') %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '' %}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + words + '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>assistant\n' + words + '<|im_end|>\n' }}{% endif %}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- endif %}
{%- endfor %}
"""
QWEN3 = (
    _QWEN3_TURNS
    + """{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""
)
QWEN3_THINKING = _QWEN3_TURNS + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{% endif %}"
LLAMA3 = """{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
MISTRAL = """{%- set said = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{{- bos_token }}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}{{- '[INST] ' + (said if loop.last else '') + m.content + '[/INST]' }}
{%- else %}{{- ' ' + m.content | trim + eos_token }}{% endif %}
{%- endfor %}"""
CHATML = """{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

FORMATS = {"qwen3": QWEN3, "qwen3 thinking": QWEN3_THINKING, "llama3": LLAMA3, "mistral": MISTRAL, "chatml": CHATML}
if folder := os.environ.get("FLEETBUS_TEMPLATES"):
    FORMATS |= {file.stem: file.read_text() for file in sorted(Path(folder).glob("*.jinja"))}

ENDS = {"llama3": "<|eot_id|>", "mistral": "</s>"}
WITH_TOOLS = {"qwen3", "qwen3 thinking"}
DROPPING = {"qwen3", "qwen3 thinking"}
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>",
]  # fmt: skip
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def write_folder(folder: Path, template: str, end: str) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["user assistant system tool\n\n think about the price of a bolt\n"] * 5, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in PLAIN])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=end, chat_template=template, additional_special_tokens=SPECIAL
    ).save_pretrained(folder)
    return folder


def opened(place: Path, name: str, **options: object) -> ChatTemplate:
    end = next((end for start, end in ENDS.items() if name.startswith(start)), "<|im_end|>")
    return ChatTemplate(write_folder(place, FORMATS[name], end), **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTemplate]:
    return {name: opened(tmp_path_factory.mktemp("format"), name) for name in FORMATS}


def rendered(template: ChatTemplate, messages: Sequence[tuple[str, str]]) -> str:
    dicts = [{"role": role, "content": content} for role, content in messages]
    text: str = template._tokenizer.apply_chat_template(dicts, tokenize=False, add_generation_prompt=True)
    return text


def opener(template: ChatTemplate) -> str:
    """What the turn to come opens with and a past one does not show."""
    _, _, tail = rendered(template, [("user", "a")]).rpartition("assistant\n")
    return tail if tail.startswith("<think>") else ""


words = st.text("abc XYZ.,?!0189é漢\n", min_size=1, max_size=24).map(str.strip).filter(bool)
thoughts = st.one_of(st.none(), words)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(system=st.one_of(st.none(), words), opening=words, turns=st.lists(st.tuples(words, words), max_size=4))
def test_without_thoughts_the_appended_turns_are_the_template_s_own_rendering(
    templates: dict[str, ChatTemplate], name: str, system: str | None, opening: str, turns: list[tuple[str, str]]
) -> None:
    template = templates[name]
    messages = ([("system", system)] if system and not template._joins_system else []) + [("user", opening)]
    ids = template.encode_prompt([ChatMessage(role=role, content=content) for role, content in messages], [])  # type: ignore[arg-type]
    mark, space = opener(template), " " if name.startswith("mistral") else ""
    for answer, observation in turns:
        ids += [*template.encode(space + answer), template.turn_end]
        ids += template.encode_continuation(ids, [ChatMessage(role="user", content=observation)])
        messages += [("assistant", answer), ("user", observation)]
    text, whole = template.decode(ids), rendered(template, messages)
    assert (text.replace(mark, "") if mark else text) == (whole.replace(mark, "") if mark else whole)
    if not mark and not name.startswith("llama3"):  # its own tokenizer never joins a header's newlines with the words after
        assert ids == template.encode(whole)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.tuples(thoughts, words, words, st.booleans()), min_size=1, max_size=4))
def test_every_sampled_token_stays_where_it_was_sampled(
    templates: dict[str, ChatTemplate], name: str, turns: list[tuple[str | None, str, str, bool]]
) -> None:
    """Thoughts included, which some templates drop: what a turn was sampled after is what it is trained after."""
    template = templates[name]
    ids = template.encode_prompt([ChatMessage(role="user", content="Begin.")], [])
    sampled: list[tuple[int, list[int]]] = []
    for thought, answer, observation, cut in turns:
        said = template.encode(f"<think>\n{thought}\n</think>\n\n{answer}" if thought else answer)
        said += [] if cut else [template.turn_end]
        sampled.append((len(ids), said))
        before = list(ids)
        ids += said
        role = "tool" if name in WITH_TOOLS else "user"
        delta = template.encode_continuation(ids, [ChatMessage(role=role, content=observation)])  # type: ignore[arg-type]
        assert delta.count(template.turn_end) == int(cut) + (0 if name.startswith("mistral") else 1)
        ids += delta
        assert ids[: len(before)] == before
        assert template.decode(ids).endswith(opener(template) or rendered(template, [("user", "x")])[-5:])
    for start, said in sampled:
        assert ids[start : start + len(said)] == said


@pytest.mark.parametrize("name", ["qwen3", "qwen3 thinking", "llama3", "mistral", "chatml"])
def test_a_template_that_drops_reasoning_is_found_out_and_refused_on_request(
    tmp_path: Path, templates: dict[str, ChatTemplate], name: str
) -> None:
    assert templates[name].drops_reasoning == (name in DROPPING)
    if name in DROPPING:
        with pytest.raises(UserError, match=r"drops earlier reasoning.*--inference-reasoning keep"):
            opened(tmp_path, name, reasoning="refuse")
    else:
        assert opened(tmp_path, name, reasoning="refuse").stop_ids


def test_a_system_message_that_the_template_would_move_is_said_with_the_first_question(
    templates: dict[str, ChatTemplate],
) -> None:
    template = templates["mistral"]
    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Who?")]
    ids = template.encode_prompt(messages, [])
    assert template.decode(ids) == rendered(template, [("system", "Be brief."), ("user", "Who?")])
    ids += [*template.encode(" Me."), template.turn_end]
    ids += template.encode_continuation(ids, [ChatMessage(role="user", content="Why?")])
    assert template.decode(ids) == "<s>[INST] Be brief.\n\nWho?[/INST] Me.</s>[INST] Why?[/INST]"


def test_several_tool_results_become_one_user_turn(templates: dict[str, ChatTemplate]) -> None:
    template = templates["qwen3"]
    results = [ChatMessage(role="tool", content="1"), ChatMessage(role="tool", content="2")]
    delta = template.decode(template.encode_continuation([template.turn_end], results))
    assert delta == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_thinking_can_be_switched_off_where_the_template_knows_how(tmp_path: Path) -> None:
    template = opened(tmp_path, "qwen3", thinking=False)
    ids = template.encode_prompt([ChatMessage(role="user", content="a")], [])
    assert template.decode(ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    ids += [*template.encode("b"), template.turn_end]
    ids += template.encode_continuation(ids, [ChatMessage(role="user", content="c")])
    assert template.decode(ids).count("<think>\n\n</think>\n\n") == 2
