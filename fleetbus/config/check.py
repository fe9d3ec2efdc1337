"""What must hold between settings, beyond the limits of each one. Pure."""

from __future__ import annotations

from fleetbus.config.settings import Configuration
from fleetbus.errors import UserError
from fleetbus_schemas.subjects import BadName, check_name


def check_configuration(configuration: Configuration) -> None:
    """Raise `UserError` for the first rule that does not hold; its line names the settings to change."""
    _check_names(configuration)
    _check_lanes(configuration)
    learner, episode, inference = configuration.learner, configuration.episode, configuration.inference
    if learner.min_group_size > learner.group_size:
        raise UserError(
            f"learner.min_group_size = {learner.min_group_size} exceeds learner.group_size = {learner.group_size}: "
            "no group could ever be trained"
        )
    if configuration.algorithm.credit == "turn" and learner.advantage not in ("grpo", "dr_grpo"):
        raise UserError(
            f"algorithm.credit = turn does not know learner.advantage = {learner.advantage}: choose grpo or dr_grpo"
        )
    _check_trainer(configuration)
    if any("@" in url.partition("://")[2].partition("/")[0] for url in inference.urls.split(",")):
        raise UserError("inference.urls must hold no password, for settings are written to files: set OPENAI_API_KEY instead")
    if episode.max_episode_tokens > inference.max_length:
        raise UserError(
            f"episode.max_episode_tokens = {episode.max_episode_tokens} exceeds inference.max_length = "
            f"{inference.max_length}: raise inference.max_length or lower the episode's limit"
        )


def _check_names(configuration: Configuration) -> None:
    run = configuration.run
    for setting, name in (("run.name", run.name), ("run.policy", run.policy), ("run.pool", run.pool)):
        try:
            check_name(setting, name)
        except BadName as error:
            raise UserError(str(error)) from error


def _check_lanes(configuration: Configuration) -> None:
    lanes = configuration.nats.lanes
    for setting, workers in (
        ("environment.workers", configuration.environment.workers),
        ("inference.workers", configuration.inference.workers),
    ):
        if workers > lanes:
            raise UserError(f"{setting} = {workers} exceeds nats.lanes = {lanes}: raise nats.lanes, each worker holds one")


def _check_trainer(configuration: Configuration) -> None:
    algorithm, trainer, store = configuration.algorithm, configuration.trainer, configuration.weights.store
    if trainer.packing and not trainer.token_budget:
        raise UserError("trainer.packing needs trainer.token_budget: the tokens of one packed row")
    if algorithm.correction_low > algorithm.correction_high:
        raise UserError(
            f"algorithm.correction_low = {algorithm.correction_low} exceeds algorithm.correction_high = "
            f"{algorithm.correction_high}: every token would be dropped"
        )
    if store not in ("folder", "nats") and "://" not in store:
        raise UserError(f"weights.store = {store}: it takes folder, nats, or a URL as s3://bucket/path")
