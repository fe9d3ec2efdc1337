"""Checks conditions between settings, beyond the limits of each one. Pure."""

from __future__ import annotations

import re

from fleetbus.config.engine_arguments import parse_engine_arguments
from fleetbus.config.engines import is_frozen, list_engines
from fleetbus.config.pools import list_served_pools, parse_pools
from fleetbus.config.seat_limits import check_seat_limits
from fleetbus.config.seats import check_seats
from fleetbus.config.settings import (
    AlgorithmSettings,
    ArchiveSettings,
    Configuration,
    EpisodeSettings,
    LearnerSettings,
    TrainerSettings,
)
from fleetbus.errors import UserError
from fleetbus_schemas.episode import DISTORTING
from fleetbus_schemas.subjects import InvalidName, check_name

_CREDENTIAL_VARIABLES = {
    "remote-gym": "GYM_API_KEY",
    "openenv": "OPENENV_TOKEN",
    "ors": "ORS_API_KEY",
    "fleet": "FLEET_API_KEY",
    "http": "MCP_BEARER_TOKEN",
    "https": "MCP_BEARER_TOKEN",
}
"""The variable that takes the credential of each kind of address, by the form of the spec."""

_CREDENTIAL_IN_QUERY = re.compile(
    rf"(?i)(?:^|[\s,=])({'|'.join(_CREDENTIAL_VARIABLES)}):[^\s?]*\?(?:[^\s]*?[&;])??"
    r"([\w.-]*(?:token|secret|passw(?:or)?d|credentials?|signature)|(?:[\w.-]*(?:api|access|auth|private)[_.-]?)?key|auth|sig)"
    r"=[^&;\s]"
)
"""Form and name of a credential in an address; commands are redacted where they are written instead."""


def check_configuration(configuration: Configuration) -> None:
    """Raise `UserError` for the first rule that does not hold; its line names the settings to change."""
    _check_names(configuration)
    _check_lanes(configuration)
    _check_pools(configuration)
    if not is_frozen(configuration.inference):  # a worker of another policy has that one's name
        check_seats(configuration.run)
    check_seat_limits(configuration.episode)
    _check_environment_addresses(configuration.run.environment)
    learner, episode, inference = configuration.learner, configuration.episode, configuration.inference
    if learner.min_group_size > learner.group_size:
        raise UserError(
            f"learner.min_group_size = {learner.min_group_size} exceeds learner.group_size = {learner.group_size}: "
            "no group could be trained"
        )
    if configuration.algorithm.credit_assignment == "turn" and learner.advantage_estimator not in ("grpo", "dr_grpo", "gae"):
        raise UserError(
            "algorithm.credit_assignment = turn does not support "
            f"learner.advantage_estimator = {learner.advantage_estimator}: choose grpo, dr_grpo or gae"
        )
    evaluation = configuration.evaluation
    if configuration.run.tasks and not evaluation.held_out and evaluation.episodes:
        raise UserError(
            f"evaluation.held_out = 0 keeps no task for evaluation.episodes = {evaluation.episodes}: "
            "set evaluation.episodes = 0, or hold tasks out"
        )
    _check_torch_only(configuration)
    _check_clips(configuration)
    check_training(configuration.algorithm, configuration.trainer)
    _check_engine(configuration)
    store = configuration.weights.store
    if store not in ("folder", "nats") and "://" not in store:
        raise UserError(f"weights.store = {store}: use folder, nats, or a URL such as s3://bucket/path")
    if configuration.weights.transfer == "collective":
        _check_collective(configuration)
    _check_archive(configuration.recorder)
    if any("@" in url.partition("://")[2].partition("/")[0] for url in inference.urls.split(",")):
        raise UserError(
            "inference.urls must not contain a password, because settings are written to files: set OPENAI_API_KEY instead"
        )
    environment = configuration.environment
    if inference.reasoning == "template" and (
        environment.compaction != "off" or environment.context_tools or environment.images
    ):
        raise UserError(
            "inference.reasoning = template renders whole conversations of text: leave out environment.compaction, "
            "context_tools and images"
        )
    drops_turns = configuration.environment.compaction != "off" or configuration.environment.context_tools
    if episode.max_episode_tokens > inference.max_model_len and not drops_turns:
        raise UserError(
            f"episode.max_episode_tokens = {episode.max_episode_tokens} exceeds inference.max_model_len = "
            f"{inference.max_model_len}: raise inference.max_model_len, lower the episode's limit, or let episodes drop turns "
            "(environment.compaction)"
        )


def _check_archive(recorder: ArchiveSettings) -> None:
    if recorder.store and "://" not in recorder.store:
        raise UserError(f"recorder.store = {recorder.store}: use a URL such as s3://bucket/path")
    if "@" in recorder.store.partition("://")[2].partition("/")[0]:
        raise UserError(
            "recorder.store must not contain a password, because settings are written to files: use the store's own variables"
        )
    if not recorder.store and (recorder.store_keep_hours or recorder.store_keep_bytes):
        raise UserError("recorder.store_keep_hours and store_keep_bytes limit what lies in recorder.store: give that, too")


def _check_environment_addresses(specs: str) -> None:
    """Refuse a credential in the query of an address: settings are written to files, logs and recordings."""
    found = _CREDENTIAL_IN_QUERY.search(specs)
    if found:
        raise UserError(
            f"the address of an environment must not hold a credential ({found[2]}=...), because settings are written to "
            f"files: set {_CREDENTIAL_VARIABLES[found[1].lower()]} instead, which is sent as a header"
        )


def _check_engine(configuration: Configuration) -> None:
    inference, trainer = configuration.inference, configuration.trainer
    if parse_engine_arguments(inference.vllm) and inference.engine not in ("vllm", "torch"):  # torch: `up` may choose vllm yet
        raise UserError(f"inference.vllm has arguments of engine vllm, and inference.engine = {inference.engine}")
    if trainer.published_weights != "adapters":
        return
    if not trainer.lora_rank:
        raise UserError("trainer.published_weights = adapters needs adapters: set trainer.lora_rank")
    taking = list_engines(lambda kind: kind.takes_adapters)
    if inference.engine not in taking or configuration.environment.images:
        raise UserError(
            f"trainer.published_weights = adapters: engines {' and '.join(taking)} take them, for text; set merged for "
            + ("environment.images" if configuration.environment.images else f"inference.engine = {inference.engine}")
        )


def _check_collective(configuration: Configuration) -> None:
    engine = configuration.inference.engine
    if engine not in ("torch", "vllm") or configuration.learner.trainer != "torch":
        raise UserError(
            "weights.transfer = collective needs inference.engine = torch or vllm and learner.trainer = torch: "
            "set files for others"
        )
    if engine == "vllm" and configuration.trainer.published_weights == "adapters":
        raise UserError("weights.transfer = collective sends whole models to vllm, which reads adapters from files: set files")


def _check_torch_only(configuration: Configuration) -> None:
    """Refuse settings that the torch trainer alone computes."""
    learner, algorithm = configuration.learner, configuration.algorithm
    asked = [name for name in ("entropy_coefficient", "teacher", "loss") if getattr(algorithm, name)]
    names = [f"algorithm.{name}" for name in asked]
    if learner.advantage_estimator in ("reinforce_plus_plus", "gae"):
        names.append(f"learner.advantage_estimator = {learner.advantage_estimator}")
    if learner.advantage_estimator == "gae" and algorithm.kl_coefficient and algorithm.kl_place == "reward":
        raise UserError("learner.advantage_estimator = gae takes the KL in the loss: leave out algorithm.kl_place = reward")
    if learner.advantage_estimator == "gae" and (configuration.environment.images or algorithm.advantage):
        raise UserError("learner.advantage_estimator = gae takes text alone, and no algorithm.advantage")
    if names and learner.trainer != "torch":
        raise UserError(f"{names[0]} needs learner.trainer = torch")
    teaches = algorithm.teacher or algorithm.loss or algorithm.advantage or algorithm.entropy_coefficient
    if learner.advantage_estimator == "none" and not teaches:
        raise UserError("learner.advantage_estimator = none: nothing would be learned; name a teacher (algorithm.teacher)")
    if configuration.reward.judge_mode == "group" and configuration.reward.judge_url and algorithm.dynamic_sampling:
        raise UserError(
            "algorithm.dynamic_sampling looks at rewards before reward.judge_mode = group gives them: leave out one of the two"
        )
    if algorithm.advantage and algorithm.credit_assignment == "turn":
        raise UserError("algorithm.advantage gives one advantage per episode: leave out algorithm.credit_assignment = turn")


OTHER_CLIPS = {
    "gspo": "about 0.0003 and 0.0004, of the whole sequence's mean ratio (arXiv 2507.18071)",
    "cispo": "1 and 4, which bounds the weight by 5 alone (arXiv 2510.13786)",
}
"""Objectives whose clips are of another size than the defaults, which are `ppo_clip`'s."""


def _check_clips(configuration: Configuration) -> None:
    learner, objective = configuration.learner, configuration.algorithm.objective
    default = LearnerSettings()
    given = (learner.clip_ratio_low, learner.clip_ratio_high)
    if (
        objective in OTHER_CLIPS
        and not configuration.algorithm.loss
        and given
        == (
            default.clip_ratio_low,
            default.clip_ratio_high,
        )
    ):
        raise UserError(
            f"learner.clip_ratio_low = {given[0]:g} and clip_ratio_high = {given[1]:g} are ppo_clip's: algorithm.objective = "
            f"{objective} takes {OTHER_CLIPS[objective]}; set both"
        )


def _check_names(configuration: Configuration) -> None:
    run = configuration.run
    for setting, name in (("run.name", run.name), ("run.policy", run.policy)):
        try:
            check_name(setting, name)
        except InvalidName as error:
            raise UserError(str(error)) from error


def _check_pools(configuration: Configuration) -> None:
    parse_pools(configuration.run.pool)
    served, slots = list_served_pools(configuration), configuration.environment.slots
    if len(served) > slots:
        raise UserError(
            f"environment.slots = {slots} is fewer than the pools that a worker serves ({', '.join(served)}): raise "
            "environment.slots, or name fewer (environment.pools)"
        )


def _check_lanes(configuration: Configuration) -> None:
    lanes = configuration.nats.lanes
    for setting, workers in (
        ("environment.workers", configuration.environment.workers),
        ("inference.workers", configuration.inference.workers),
    ):
        if workers > lanes:
            raise UserError(f"{setting} = {workers} exceeds nats.lanes = {lanes}: raise nats.lanes, each worker holds one")


def check_trained_distribution(episode: EpisodeSettings) -> None:
    """Raise `UserError` for what makes sampled tokens come from another distribution than the one that is trained, which is
    the policy's at its temperature: log-probabilities of samples and trainer would not be of the same thing."""
    neutral = EpisodeSettings()
    for name in DISTORTING:
        if (given := getattr(episode, name)) != getattr(neutral, name):
            raise UserError(
                f"episode.{name} = {given:g} samples from another distribution than the one that is trained: training takes "
                f"{getattr(neutral, name):g}; set it for `fleetbus evaluate` alone, as FLEETBUS_EPISODE_{name.upper()}"
            )


def check_training(algorithm: AlgorithmSettings, trainer: TrainerSettings) -> None:
    """The same for a trainer alone, however it was configured."""
    if trainer.packing and not trainer.token_budget:
        raise UserError("trainer.packing needs trainer.token_budget: the tokens of one packed row")
    follows = algorithm.pulls_to_a_model and algorithm.kl_reference == "moving"
    if trainer.saved_model == "reference" and not follows:
        raise UserError(
            "trainer.saved_model = reference needs one that follows the policy: set algorithm.kl_reference = moving and "
            "algorithm.kl_coefficient"
        )
    if follows and trainer.lora_rank:
        raise UserError(
            "algorithm.kl_reference = moving follows all weights, and with trainer.lora_rank the reference is the model "
            "without adapters: set algorithm.kl_reference = start, or trainer.lora_rank = 0"
        )
    if (
        algorithm.kl_coefficient
        and (algorithm.kl_place, algorithm.kl_estimator) == ("loss", "k1")
        and not algorithm.kl_ratio_weight
    ):
        raise UserError(
            "algorithm.kl_estimator = k1 in the loss pulls nowhere: its gradient is 0 on average; set k2 or k3, or "
            "algorithm.kl_place = reward, or algorithm.kl_ratio_weight = true"
        )
    low, high = algorithm.rollout_correction_low, algorithm.rollout_correction_high
    if low > high:
        raise UserError(
            f"algorithm.rollout_correction_low = {low} exceeds algorithm.rollout_correction_high = {high}: "
            "every token would be dropped"
        )
    if algorithm.rollout_correction == "geometric" and low > 1.0:
        raise UserError(f"algorithm.rollout_correction_low = {low}: a geometric mask has to let 1 through")
