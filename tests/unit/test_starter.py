"""The starter policy: the shipped files, the conversations that it learns from, and a build cut down to a few steps."""

import filecmp
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fleetbus_schemas import ChatMessage
from fleetbus_workers.environment.adapters.warehouse.items import TOOLS, draw_warehouse
from fleetbus_workers.environment.adapters.warehouse.tasks import HELD_OUT_BASE, build_held_out_tasks
from fleetbus_workers.inference.chat_template import ChatTemplate
from fleetbus_workers.learner.torch.forward import can_share_prefix, has_plain_head
from fleetbus_workers.starter.build import TEST_SEED, StarterSettings, build_starter, find_starter_folder
from fleetbus_workers.starter.conversation import TURN_LIMIT, play, play_many
from fleetbus_workers.starter.local_rollout import compute_success_rate, run_rollouts, step_environment
from fleetbus_workers.starter.tokenizer import TURN_END, encode, encode_with_mask, render, train_tokenizer
from fleetbus_workers.starter.warm_start import COPY_LENGTH, generate_copy_sequences

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(find_starter_folder(), local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(find_starter_folder(), local_files_only=True).eval()


def test_the_shipped_folder_is_whole_and_small():
    assert {file.name for file in find_starter_folder().iterdir()} == FILES
    assert (find_starter_folder() / "model.safetensors").stat().st_size <= 2 << 20
    config = json.loads((find_starter_folder() / "config.json").read_text())
    assert config["vocab_size"] % 16 == 0
    assert config["head_dim"] == 64


@pytest.mark.integration
def test_the_shipped_policy_solves_about_a_third_of_unseen_tasks(model, tokenizer):
    warehouses = [draw_warehouse(task.seed) for task in build_held_out_tasks(128)]  # type: ignore[arg-type]

    assert 0.2 <= compute_success_rate(run_rollouts(model, tokenizer, warehouses, seed=3)) <= 0.42


def test_the_shipped_model_has_the_fast_path_of_the_trainer(model):
    assert can_share_prefix(model)
    assert has_plain_head(model)


def test_conversations_are_tokenised_turn_by_turn_as_the_inference_worker_does(tokenizer):
    template = ChatTemplate(find_starter_folder())
    for conversation in play_many(20, seed=4):
        expected, mask = encode_with_mask(tokenizer, conversation.messages)
        ids = template.encode_prompt(conversation.messages[:2], ())
        for index in range(2, len(conversation.messages), 2):
            sampled = expected[len(ids) :]
            sampled = sampled[: sampled.index(tokenizer.eos_token_id) + 1]
            assert all(mask[len(ids) : len(ids) + len(sampled)])
            assert template.decode_text(sampled) == conversation.messages[index].content
            ids += sampled
            if index + 1 < len(conversation.messages):
                ids += template.encode_continuation(sampled, conversation.messages[index + 1 : index + 2])
        assert ids == expected[: len(ids)]
        assert not any(mask[len(ids) :])


def test_tools_that_an_agent_offers_are_the_tokens_that_it_was_trained_on(tokenizer):
    template = ChatTemplate(find_starter_folder())
    for conversation in play_many(20, seed=4):
        described, question, first, *rest = conversation.messages
        assert template.encode_prompt([question], TOOLS) == template.encode_prompt([described, question], ())
        (call,) = template.parse_text(str(first.content), TOOLS).calls
        assert call.name == "find_item"
        shown = str(rest[0].content)
        result = ChatMessage(role="tool", content=shown.removeprefix("Tool result:\n"), tool_call_id=call.id)
        sampled = encode(tokenizer, f"{first.content}{TURN_END}")
        assert template.encode_continuation(sampled, [result]) == template.encode_continuation(sampled, rest[:1])


def test_marks_and_digits_are_tokens_of_their_own(tokenizer):
    template = ChatTemplate(find_starter_folder())

    assert all(template.token_to_id(token) is not None for token in ("<tool_call>", "</tool_call>", "<done>", "<|im_end|>"))
    assert [tokenizer.decode([id]) for id in tokenizer.encode("47")] == ["4", "7"]
    assert tokenizer.decode(tokenizer.encode('<tool_call>{"id": 47} <done>')) == '<tool_call>{"id": 47} <done>'


def test_the_chat_template_renders_what_the_warm_start_was_trained_on(tokenizer):
    messages = play_many(1, seed=1)[0].messages
    plain = [{"role": message.role, "content": message.content} for message in messages]

    assert tokenizer.apply_chat_template(plain, tokenize=False) == render(messages)


def test_the_tokenizer_is_the_same_every_time():
    texts = [render(conversation.messages) for conversation in play_many(60, seed=2)]

    first, second = (train_tokenizer(texts).backend_tokenizer.to_str() for _ in range(2))

    assert first == second


def test_the_expert_errs_by_a_known_rate_and_keeps_to_the_turn_limit():
    conversations = play_many(2000, seed=9)

    assert np.mean([conversation.success for conversation in conversations]) == pytest.approx(0.35, abs=0.04)
    turns = [sum(message.role == "assistant" for message in c.messages) for c in conversations]
    assert max(turns) == TURN_LIMIT
    assert min(turns) == 2


def test_an_expert_without_errors_always_succeeds_in_three_turns():
    for seed in range(50):
        conversation = play(draw_warehouse(seed), random.Random(seed), error_rate=0.0)
        assert conversation.success
        assert len(conversation.messages) == 2 + 2 + 2 + 1


def test_what_the_expert_sees_is_what_the_rehearsed_environment_says():
    for seed in range(200):
        warehouse = draw_warehouse(seed)
        conversation = play(warehouse, random.Random(seed), error_rate=0.5)
        turns = conversation.messages[2:]
        for said, seen in zip(turns[::2], turns[1::2], strict=False):
            assert step_environment(warehouse, said.content) == (seen.content, None)  # type: ignore[arg-type]
        assert step_environment(warehouse, turns[-1].content) == ("", float(conversation.success))  # type: ignore[arg-type]


def test_a_rehearsed_episode_has_the_log_probabilities_of_a_plain_forward_pass(model, tokenizer):
    warehouses = [draw_warehouse(TEST_SEED + index) for index in range(6)]

    for episode in run_rollouts(model, tokenizer, warehouses, seed=5):
        ids = torch.tensor(episode.ids)
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
        mask = torch.tensor(episode.loss_mask[1:])
        torch.testing.assert_close(torch.tensor(episode.logprobs[1:])[mask], logprobs[mask], atol=1e-4, rtol=0)
        assert not torch.tensor(episode.logprobs[1:])[~mask].any()


def test_warehouses_of_the_warm_start_are_never_held_out():
    assert TEST_SEED + 10_000 < HELD_OUT_BASE


def test_copied_tokens_are_masked_exactly_where_they_can_be_predicted():
    ids, masks = generate_copy_sequences(50, vocabulary=range(3, 500), seed=0)

    for sequence, mask in zip(ids, masks, strict=True):
        period = int(np.argmax(mask)) - 1
        assert len(sequence) == COPY_LENGTH
        assert (sequence[period:] == sequence[:-period]).all()
        assert mask[period + 1 :].all()


TINY = StarterSettings(conversations=40, copy_steps=2, imitation_steps=2, test_episodes=2)


@pytest.mark.integration
def test_a_build_of_a_few_steps_reports_and_gives_the_same_files_twice(tmp_path):
    lines: list[str] = []
    for name in ("first", "second"):
        build_starter(tmp_path / name, seed=5, report=lines.append, settings=TINY)

    assert {file.name for file in (tmp_path / "first").iterdir()} == FILES
    for name in FILES:
        assert filecmp.cmp(tmp_path / "first" / name, tmp_path / "second" / name, shallow=False), name
    assert any("copy" in line for line in lines)
    assert any("expert" in line for line in lines)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "first", local_files_only=True) is not None


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_whole_build_succeeds_about_as_often_as_its_expert(tmp_path: Path):  # type: ignore[no-untyped-def]
    report = build_starter(tmp_path, seed=11, report=lambda line: None)

    assert 0.2 <= report.sampled_success <= 0.42
    assert report.greedy_success > report.sampled_success
