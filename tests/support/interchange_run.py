"""A recording with every kind of episode that formats of other tools have to hold, and the answers as its log has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from fleetbus.bus.base import StreamEntry
from fleetbus.core.episode.history import Turn, loss_mask
from fleetbus.core.episode.segments import describe_segments, fold_segments
from fleetbus.log.stored_entries import read_stored
from fleetbus.recording.format import RecordingHeader
from fleetbus.recording.reader import RecordingReader
from fleetbus.recording.writer import create_recording
from fleetbus_schemas import (
    Action,
    AttemptStarted,
    ChatMessage,
    EpisodeFinished,
    EpisodeRequested,
    EpisodeSeat,
    Image,
    Message,
    Observation,
    SeatPolicy,
    SegmentOrigin,
    ShownImage,
    Subjects,
    Task,
    Text,
    ToolCall,
    ToolSpec,
    UntrainedTurn,
    VersionSpan,
    encode,
)
from fleetbus_schemas.tokens import pack_ids, pack_logprobs, pack_mask, unpack_ids, unpack_logprobs

SUBJECTS = Subjects("exchange")
SECOND = 10**9
START_NS = 1_790_000_000 * SECOND
TOOLS = (ToolSpec("look", "Look something up.", {"type": "object", "properties": {"what": {"type": "string"}}}),)
Answers = dict[tuple[str, int], tuple[list[int], list[int], list[float]]]


class ExchangeRun:
    """The log in the making."""

    def __init__(self) -> None:
        self.entries: list[StreamEntry] = []
        self._token = 0

    def add(self, subject: str, message: Message) -> int:
        sequence = len(self.entries) + 1
        self.entries.append(
            StreamEntry(subject=subject, payload=encode(message), sequence=sequence, time_ns=START_NS + sequence * SECOND)
        )
        return sequence

    def play(self, episode: str, turns: list[dict[str, Any]], **result: Any) -> None:
        """An episode: of each turn its ``messages``, ``tools``, ``seat`` and the fields of its Action that are not by default;
        ``others`` are the policies of seats."""
        others: tuple[SeatPolicy, ...] = tuple(result.pop("others", ()))
        task = Task(key=result.get("task_key", "task-1"), env="desk", prompt="Find it.", verifier="def verify(env): return 0")
        split = result.get("split", "train")
        request = EpisodeRequested(
            episode_id=episode, group_id="group-1", sample_index=0, split=split, task=task, policy="default", deadline_ns=1,
            max_turns=9, seats=others,
        )  # fmt: skip
        position = self.add(SUBJECTS.task("default", episode), request)
        self.add(SUBJECTS.episode(episode), AttemptStarted(episode_id=episode, attempt=1, worker="w", nonce=episode, lane="e0"))
        history = [self._play_turn(episode, number, dict(turn), others) for number, turn in enumerate(turns)]
        if result.get("outcome") == "open":
            return
        actions = [turn.action for turn in history]
        untrained = tuple(result.get("untrained", ()))
        mask = loss_mask(history, {each.turn for each in untrained})
        finished = EpisodeFinished(
            episode_id=episode, group_id="group-1", attempt=1, outcome="completed", worker="w", task_key=task.key, env="desk",
            request_sequence=position, reward=1.0, turns=len(history), actions=tuple(turn.reference for turn in history),
            tokens=len(mask), loss_mask=pack_mask(mask), segments=describe_segments(fold_segments(actions)),
            policy_versions=(3,), timings={"step": 0.5},
        )  # fmt: skip
        self.add(SUBJECTS.episode(episode), msgspec.structs.replace(finished, **result))

    def _play_turn(self, episode: str, number: int, given: dict[str, Any], others: tuple[SeatPolicy, ...]) -> Turn:
        seat = given.pop("seat", "")
        policy = next((each.policy for each in others if each.seat == seat), "default")
        messages, tools = given.pop("messages", ()), given.pop("tools", ())
        shown, sampled = given.pop("shown", 4), given.pop("sampled", 3)
        observation = Observation(
            episode_id=episode, attempt=1, turn=number, policy=policy, messages=tuple(messages), tools=tools,
            tokens_left=99, environment_lane="e0", deadline_ns=1, seat=seat,
        )  # fmt: skip
        self.add(SUBJECTS.observation(policy, "any", episode), observation)
        action = Action(
            episode_id=episode, attempt=1, turn=number, text=f"answer {number}", prompt_delta=self._draw(shown),
            sampled=self._draw(sampled), logprobs=pack_logprobs([-0.1 * (each + 1) / 3 for each in range(sampled)]),
            versions=(VersionSpan(version=3, start=0, stop=sampled),), worker="inference",
        )  # fmt: skip
        action = msgspec.structs.replace(action, **given)
        return Turn(sequence=self.add(SUBJECTS.action("e0", episode), action), lane="e0", action=action)

    def _draw(self, count: int) -> bytes:
        self._token += count
        return pack_ids(1 + (self._token + each) % 500 for each in range(count))


def say(role: Any, content: Any, **fields: Any) -> ChatMessage:
    return ChatMessage(role=role, content=content, **fields)


def build_run() -> ExchangeRun:
    """One episode of each kind."""
    run = ExchangeRun()
    play_kinds(run)
    return run


def play_kinds(run: ExchangeRun, suffix: str = "") -> None:
    """Six episodes, whose names end in ``suffix``."""
    opening = (say("system", "Be brief."), say("user", "Find it."))
    with_id = (ToolCall(name="look", arguments={"what": "a"}, id="call-7"),)
    without_id = (ToolCall(name="look", arguments={"what": "b"}, arguments_text='{"what":  "b"}'),)
    run.play(
        "plain" + suffix,
        [
            {"messages": opening, "tools": TOOLS, "tool_calls": with_id},
            {"messages": (say("tool", "17", tool_call_id="call-7", name="look"),), "tool_calls": without_id},
            {"messages": (say("tool", "18", name="look"), say("user", "Go on.")), "finish_reason": "length"},
        ],
        last_observation="That was it.", reward_components={"verifier": 1.0, "judge": 0.5}, task_key="task/one",
    )  # fmt: skip
    run.play(
        "tree" + suffix,
        [
            {"messages": opening, "shown": 6},
            {"messages": (say("user", "And?"),)},
            {"messages": (say("user", "Summed up."),), "segment": 1, "origin": leave(0, 6, "context_dropped", 2)},
            {
                "messages": (say("system", "You help."), say("user", "Help.")), "tools": TOOLS, "segment": 2,
                "origin": leave(-1, 0, "sub_agent"),
            },
            {"messages": (say("user", "Done?"),), "segment": 1},
            {"messages": (say("user", "Again."),), "segment": 0},
            {"messages": (say("user", "Last."),), "segment": 3, "origin": leave(1, 18, "history_edited")},
        ],
        reward=0.25, untrained=(UntrainedTurn(turn=1, reason="side_call"),), outcome="truncated",
    )  # fmt: skip
    image = Image(object="ab" * 32, width=8, height=8)
    pictures = (say("user", (Text(text="See "), image)), say("assistant", "I see.", reasoning="Hm."), say("user", "And now?"))
    run.play(
        "pictures" + suffix,
        [{"messages": pictures, "images": (ShownImage(object="ab" * 32, start=1, stop=3),)}],
        reward=0.0,
        split="eval",
    )
    run.play("failed" + suffix, [], outcome="env_failed", reward=None, error_class="open_failed", error="no desk")
    run.play("unfinished" + suffix, [{"messages": opening}], outcome="open")
    play_game(run, "game" + suffix)


def play_game(run: ExchangeRun, name: str) -> None:
    """Three seats: the run's policy, one that another learner trains, whose context is changed, and one that nobody trains."""
    run.play(
        name,
        [
            {"messages": (say("user", "Propose."),), "seat": "proposer"},
            {"messages": (say("user", "Solve."),), "seat": "solver", "segment": 1, "origin": leave(-1, 0, "seat")},
            {"messages": (say("user", "Judge."),), "seat": "judge", "segment": 2, "origin": leave(-1, 0, "seat")},
            {"messages": (say("user", "Again."),), "seat": "solver", "segment": 3, "origin": leave(1, 4, "history_edited")},
            {"messages": (say("user", "Well?"),), "seat": "proposer"},
        ],
        others=(SeatPolicy(seat="solver", policy="solver", trained=True), SeatPolicy(seat="judge", policy="frozen-judge")),
        seats=(
            EpisodeSeat(name="proposer", turns=(0, 4), reward=0.25),
            EpisodeSeat(name="solver", turns=(1, 3), reward=0.75, policy="solver", versions=(3,)),
            EpisodeSeat(name="judge", turns=(2,), reason="the policy frozen-judge plays it, which is not trained here"),
        ),
        untrained=(UntrainedTurn(turn=2, reason="seat"),), reward=0.25, last_observation="Both have played.",
    )  # fmt: skip


def leave(parent: int, kept: int, reason: Any, repeated: int = 0) -> SegmentOrigin:
    return SegmentOrigin(parent=parent, kept=kept, reason=reason, repeated=repeated)


def write_run(file: Path, run: ExchangeRun | None = None) -> Path:
    with create_recording(file, RecordingHeader(run=SUBJECTS.run)) as writer:
        writer.add((run or build_run()).entries)
    return file


def list_answers(file: Path) -> Answers:
    """Of each answer of a recording, by episode and turn: the whole prompt's ids, the sampled ids, the log-probabilities."""
    actions = {entry.sequence: message for entry, message in _iterate(file) if isinstance(message, Action)}
    found: Answers = {}
    for _, result in _iterate(file):
        if not isinstance(result, EpisodeFinished):
            continue
        sequences: list[list[int]] = []
        for reference in result.actions:
            action = actions[reference.sequence]
            if action.segment == len(sequences):
                origin = action.origin
                sequences.append(sequences[origin.parent][: origin.kept] if origin is not None and origin.parent >= 0 else [])
            prompt = sequences[action.segment] + unpack_ids(action.prompt_delta)
            sampled = unpack_ids(action.sampled)
            found[result.episode_id, reference.turn] = prompt, sampled, unpack_logprobs(action.logprobs)
            sequences[action.segment] = prompt + sampled
    return found


def _iterate(file: Path) -> Iterator[tuple[StreamEntry, Message | None]]:
    return ((entry, read_stored(entry)) for entry in RecordingReader(file).entries())
