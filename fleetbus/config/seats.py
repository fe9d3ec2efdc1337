"""Other policies in a run: who plays which seat of its episodes, and where a policy is served that nobody trains. Pure.

The setting ``run.seats`` has one item a line: ``SEAT=POLICY`` for a policy that inference workers of its own serve, or
``SEAT=[MODEL@]URL`` for a server with chat completions and ``SEAT=model:MODEL`` for a model as it is: these are policies named
as their seat, and `up` starts their workers (docs/decisions/0249-seats-of-other-policies.md). So is that of ``SEAT=train`` and
``SEAT=train:MODEL``, which a learner of its own trains from the same episodes
(docs/decisions/0252-a-learner-for-each-policy.md), and that of ``SEAT=league:RULE``, which earlier versions of the run's policy
play (`fleetbus.config.league`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from fleetbus.config.league import League, parse_league
from fleetbus.config.settings import Configuration, RunSettings
from fleetbus.errors import UserError
from fleetbus_schemas import SamplingSettings, SeatPolicy
from fleetbus_schemas.names import is_name

FORMS = "SEAT=POLICY, SEAT=[MODEL@]URL, SEAT=model:MODEL, SEAT=train[:MODEL] or SEAT=league:RULE"
MODEL = "model:"
TRAIN = "train"
POLICIES = "policies"
"""In the folder of a run, the folders of the policies of trained seats."""


class SeatSetting(msgspec.Struct, frozen=True, kw_only=True):
    """``seat`` is played by ``policy``. With a ``url`` or a ``model`` an inference worker of `up` serves it: the model that the
    server there calls ``served_model``, or the model itself. A ``trained`` one has a learner, too, which begins with ``model``
    (empty: with the run's). A ``league`` is the run's own policy as it was."""

    seat: str
    policy: str
    url: str = ""
    served_model: str = ""
    model: str = ""
    trained: bool = False
    league: League | None = None

    @property
    def is_served(self) -> bool:
        """True if `up` starts a worker for it."""
        return bool(self.url or self.model or self.trained or self.league)


def parse_seats(text: str) -> tuple[SeatSetting, ...]:
    """The seats that other policies play, in the order in which they are named. Raises `UserError`."""
    found: dict[str, SeatSetting] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        seat, _, value = line.partition("=")
        if not is_name(seat) or not value:
            raise UserError(f"run.seats {line!r}: write {FORMS}; a seat is 1 to 128 letters, digits, '-' or '_'")
        if seat in found:
            raise UserError(f"run.seats names two policies for the seat {seat}; give it one")
        found[seat] = _parse_value(seat, value)
    return tuple(found.values())


def list_trained_seats(run: RunSettings) -> tuple[SeatSetting, ...]:
    """The seats whose policies are trained by learners of their own. Raises `UserError`."""
    return tuple(seat for seat in parse_seats(run.seats) if seat.trained)


def list_leagues(run: RunSettings) -> dict[str, League]:
    """The leagues of a run by the seat that they play. Raises `UserError`."""
    return {seat.seat: seat.league for seat in parse_seats(run.seats) if seat.league is not None}


def _parse_value(seat: str, value: str) -> SeatSetting:
    if (league := parse_league(seat, value)) is not None:
        return SeatSetting(seat=seat, policy=seat, league=league)
    if value == TRAIN or value.removeprefix(f"{TRAIN}:") not in ("", value):
        return SeatSetting(seat=seat, policy=seat, model=value.removeprefix(TRAIN).removeprefix(":"), trained=True)
    if value.startswith(MODEL) and (model := value.removeprefix(MODEL)):
        return SeatSetting(seat=seat, policy=seat, model=model)
    if "://" in value:
        served_model, _, url = value.rpartition("@") if value.partition("://")[0].count("@") else ("", "", value)
        if not url.startswith(("http://", "https://")):
            raise UserError(f"run.seats: the address of the seat {seat} must begin with http:// or https://")
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise UserError(
                f"run.seats: the address of the seat {seat} must not contain a password, because settings are written to "
                "files: set OPENAI_API_KEY instead"
            )
        return SeatSetting(seat=seat, policy=seat, url=url, served_model=served_model)
    if not is_name(value):
        raise UserError(f"run.seats: {value!r} is no policy's name for the seat {seat}: write {FORMS}")
    return SeatSetting(seat=seat, policy=value)


def list_policies(run: RunSettings) -> tuple[str, ...]:
    """The policies of a run, each once: the one that is trained, then those of other seats."""
    return tuple(dict.fromkeys((run.policy, *(seat.policy for seat in parse_seats(run.seats)))))


def list_joined_policies(run: RunSettings) -> tuple[str, ...]:
    """The policies of those seats."""
    return tuple(seat.policy for seat in list_trained_seats(run))


def find_joined_policy(configuration: Configuration) -> str:
    """The policy of a learner that trains what another one asks for; empty for one that asks itself."""
    return configuration.run.policy if configuration.learner.requested_by else ""


def build_seats(configuration: Configuration) -> tuple[SeatPolicy, ...]:
    """The seats of other policies as requests carry them; those that are trained, or that versions of the run's own policy
    play, are sampled as each request says."""
    episode, trained = configuration.episode, list_joined_policies(configuration.run)
    sampling = SamplingSettings(temperature=episode.seat_temperature, max_tokens=episode.seat_max_tokens)
    return tuple(
        SeatPolicy(seat=seat.seat, policy=seat.policy, sampling=sampling, trained=seat.policy in trained)
        for seat in parse_seats(configuration.run.seats)
    )


def configure_seat(configuration: Configuration, seat: SeatSetting) -> Configuration:
    """The configuration of an inference worker that serves the policy of a seat: as it is, unless it is trained."""
    versions_of = configuration.run.policy if seat.league is not None else ""
    inference = msgspec.structs.replace(configuration.inference, frozen=not seat.trained, versions_of=versions_of)
    if seat.url:
        inference = msgspec.structs.replace(inference, engine="chat", urls=seat.url, served_model_name=seat.served_model)
    run = msgspec.structs.replace(configuration.run, policy=seat.policy, model=seat.model or configuration.run.model)
    return msgspec.structs.replace(configuration, inference=inference, run=run)


def configure_learner(configuration: Configuration, seat: SeatSetting) -> Configuration:
    """The configuration of the learner of a trained seat's policy: it trains what the run's own learner asks for, which also
    plays the held-out tasks. Where that begins with a checkpoint of another run, the one of this policy is in the policy's
    folder beside it (`fleetbus fork`)."""
    origin = Path(configuration.learner.begin_with)
    begin_with = str(origin.parent / POLICIES / seat.policy / origin.name) if configuration.learner.begin_with else ""
    learner = msgspec.structs.replace(configuration.learner, requested_by=configuration.run.policy, begin_with=begin_with)
    run = msgspec.structs.replace(configuration.run, policy=seat.policy, model=seat.model or configuration.run.model)
    evaluation = msgspec.structs.replace(configuration.evaluation, episodes=0)
    return msgspec.structs.replace(configuration, learner=learner, run=run, evaluation=evaluation)


def resolve_models(text: str, resolve: Callable[[str], str]) -> str:
    """The setting ``run.seats`` with what ``resolve`` makes of the models that it names."""
    lines = []
    for seat, line in zip(parse_seats(text), filter(None, map(str.strip, text.splitlines())), strict=True):
        form = f"{TRAIN}:" if seat.trained else MODEL
        lines.append(f"{seat.seat}={form}{resolve(seat.model)}" if seat.model else line)
    return "\n".join(lines)


def freeze_trained(text: str, model: str) -> str:
    """The setting ``run.seats`` where nobody trains: policies that would be trained are the models that they would begin with,
    ``model`` where the seat names none, as in a league."""
    lines = zip(parse_seats(text), filter(None, map(str.strip, text.splitlines())), strict=True)
    return "\n".join(
        f"{seat.seat}={MODEL}{seat.model or model}" if seat.trained or seat.league else line for seat, line in lines
    )


def check_learner(configuration: Configuration) -> None:
    """Raise `UserError` if a learner of this configuration would find nothing to train, or its policy's seats could not be
    trained by one of several."""
    run, learner, reward, weights = configuration.run, configuration.learner, configuration.reward, configuration.weights
    trained = list_joined_policies(run)
    asks = learner.requested_by
    if asks and not is_name(asks):
        raise UserError(f"learner.requested_by = {asks!r} is no name of a policy: 1 to 128 letters, digits, '-' or '_'")
    if asks == run.policy:
        raise UserError(
            f"learner.requested_by = {asks} is the policy that this learner trains (run.policy): leave it out, or name the one "
            "whose learner asks for the episodes"
        )
    if asks and run.policy not in trained:
        raise UserError(
            f"learner.requested_by = {asks}: the policy {run.policy} has no seat that is trained in its episodes: name one "
            f"(--seat {run.policy}={TRAIN}), or another policy (--run-policy)"
        )
    if asks in trained:
        raise UserError(
            f"learner.requested_by = {asks} is the policy of a seat, whose learner asks for nothing: name the policy that the "
            "run was declared for"
        )
    if not asks and run.policy in trained:
        raise UserError(
            f"run.seats has the seat {run.policy} trained by a learner of its own, and {run.policy} is the policy of this one: "
            "name the policy whose learner asks for the episodes (learner.requested_by), or give the run another policy "
            "(run.policy)"
        )
    if trained and learner.trainer != "torch":
        raise UserError(f"run.seats trains {min(trained)}: several policies are trained with learner.trainer = torch alone")
    if trained and weights.store == "folder" and weights.public_url:
        raise UserError(
            f"run.seats trains {min(trained)}: weights.public_url is the address of one folder, and each policy has its own: "
            "set weights.store = nats or a URL, or leave out weights.public_url"
        )
    if trained and reward.judge_url and reward.judge_mode == "group":
        raise UserError(
            f"run.seats trains {min(trained)}: a judge of groups changes the rewards of one learner alone; set "
            "reward.judge_mode = absolute, or leave out reward.judge_url"
        )


def check_seats(run: RunSettings) -> None:
    """Raise `UserError` if a seat is given to the policy that plays all others; a worker of a trained one has its name."""
    trained = list_joined_policies(run)
    for seat in parse_seats(run.seats):
        if seat.policy == run.policy not in trained:
            raise UserError(f"run.seats gives the seat {seat.seat} to {run.policy}, which is the policy that the run trains")
