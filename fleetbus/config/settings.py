"""Everything that can be configured, defined once: TOML tables, command-line flags and ``FLEETBUS_*`` variables come from here.

A field ``steps`` of the table ``learner`` is ``[learner] steps = 50`` in TOML, ``--learner-steps 50`` on the command line and
``FLEETBUS_LEARNER_STEPS=50`` in the environment. The annotation's ``description`` is its help. Times are seconds.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from fleetbus.config.engines import EngineName
from fleetbus.config.environment_settings import EnvironmentSettings as EnvironmentSettings
from fleetbus.config.table import Settings
from fleetbus.config.training_settings import DEVICE, DEVICES
from fleetbus.config.training_settings import AlgorithmSettings as AlgorithmSettings
from fleetbus.config.training_settings import LearnerSettings as LearnerSettings
from fleetbus.config.training_settings import RewardSettings as RewardSettings
from fleetbus.config.training_settings import TinkerSettings as TinkerSettings
from fleetbus.config.training_settings import TrainerSettings as TrainerSettings

MAX_LANES = 10_240

ADMISSION_SHARE = 0.7
"""Share of the log that new requests may fill, by default."""

FULL_SHARE = 0.95
"""A log as full as this refuses larger messages of admitted work too."""


class RunSettings(Settings, frozen=True, kw_only=True):
    """The subject of training, and the place of its files."""

    name: Annotated[str, Meta(description="Name of the run; the same name again resumes it")] = "default"
    folder: Annotated[str, Meta(description="Folder in which each run has a folder of its own")] = ".fleetbus/runs"
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1, description="Seed of tasks, sampling and training")] = 1
    model: Annotated[
        str, Meta(description="Model folder, GGUF file, smollm2 or Hugging Face Hub id (default: the built-in starter policy)")
    ] = ""
    tasks: Annotated[str, Meta(description="Tasks file in Fleet JSON (default: the warehouse tasks)")] = ""
    environment: Annotated[
        str,
        Meta(
            description="Environment: warehouse, mcp:module:factory, module:Class, ... (docs/environments.md); KEY=SPEC for "
            "the tasks of one environment key; repeatable"
        ),
    ] = "warehouse"
    profile: Annotated[
        Literal["auto", "laptop", "gpu"],
        Meta(
            description="Settings by default: gpu, for a model of yours (docs/gpu.md), also for roles of its run that have no "
            "GPU; auto: gpu where GPUs are visible"
        ),
    ] = "auto"
    policy: Annotated[str, Meta(description="Name of the policy")] = "default"
    pool: Annotated[
        str,
        Meta(
            description="Pool of environment workers that episodes are requested in; KEY=POOL for the tasks of one environment "
            "key; repeatable"
        ),
    ] = "default"
    seats: Annotated[
        str,
        Meta(
            description="Seat that another policy plays, as it is: SEAT=POLICY, SEAT=[MODEL@]URL or SEAT=model:MODEL; "
            "that a learner of its own trains: SEAT=train[:MODEL]; or that earlier versions of the policy play: "
            "SEAT=league:newest, SEAT=league:uniform:K or SEAT=league:win_rate:K; repeatable"
        ),
    ] = ""


class NatsSettings(Settings, frozen=True, kw_only=True):
    """The broker and the log."""

    url: Annotated[str, Meta(description="Server to use, or a context of the nats command line; empty: `up` starts one")] = ""
    auth: Annotated[str, Meta(description="Folder of `fleetbus auth init`, or a .creds file; empty: neither")] = ""
    port: Annotated[int, Meta(ge=0, le=65535, description="Port of the server that `up` starts; 0: a free one")] = 0
    sync: Annotated[
        float, Meta(ge=0, description="Seconds of the log that a power failure may lose on that server; 0: none, but slower")
    ] = 1.0
    lanes: Annotated[int, Meta(ge=1, le=MAX_LANES, description="Lanes declared per role: the most workers of one role")] = 16
    replicas: Annotated[
        int, Meta(ge=0, le=5, description="Servers that keep a copy of the log; 0: as the server is configured")
    ] = 0
    max_bytes: Annotated[int, Meta(ge=1 << 20, description="Limit of the log in bytes")] = 4 << 30
    admission: Annotated[float, Meta(gt=0, le=1, description="Share of the log that new requests may fill")] = ADMISSION_SHARE


class EpisodeSettings(Settings, frozen=True, kw_only=True):
    """Limits and rules of one episode."""

    temperature: Annotated[float, Meta(ge=0, description="Sampling temperature in training")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="Nucleus sampling; training: 1")] = 1.0
    top_k: Annotated[int, Meta(ge=0, description="Likeliest tokens that may be sampled; training: 0, which is all")] = 0
    min_p: Annotated[float, Meta(ge=0, le=1, description="Least share of the likeliest token's probability; training: 0")] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2, description="Penalty of tokens that occurred; training: 0")] = 0.0
    frequency_penalty: Annotated[
        float, Meta(ge=-2, le=2, description="Penalty of tokens by how often they occurred; training: 0")
    ] = 0.0
    repetition_penalty: Annotated[
        float, Meta(gt=0, le=10, description="Divisor of the logits of tokens that occurred; training: 1")
    ] = 1.0
    timeout_reward: Annotated[
        str,
        Meta(
            pattern=r"^(-?\d+(\.\d+)?)?$",
            title="a number, or nothing",
            description="Reward in training of an episode whose time is up after its first turn; empty: it is not trained",
        ),
    ] = ""
    max_tokens: Annotated[int, Meta(ge=1, description="Maximum number of tokens per turn")] = 64
    max_turns: Annotated[int, Meta(ge=1, description="Maximum number of turns per episode")] = 5
    max_episode_tokens: Annotated[int, Meta(ge=1, description="Maximum number of tokens per episode, including the prompt")] = (
        1024
    )
    seat_max_tokens: Annotated[int, Meta(ge=1, description="Maximum number of tokens per turn of other policies' seats")] = 512
    seat_temperature: Annotated[float, Meta(ge=0, description="Sampling temperature of other policies' seats")] = 1.0
    seat_limits: Annotated[
        str,
        Meta(
            description="Limit of one seat in an episode, whoever plays it: SEAT.max_turns=N, or SEAT.max_tokens=N for what "
            "all its turns add, prompts included; repeatable"
        ),
    ] = ""


class LimitSettings(Settings, frozen=True, kw_only=True):
    """Time limits, in seconds, which show up as the outcome's error class; and when `up` ends a run that cannot progress."""

    open: Annotated[float, Meta(gt=0, description="Seconds to open the environment")] = 120.0
    reset: Annotated[float, Meta(gt=0, description="Seconds to begin the episode")] = 120.0
    tool_call: Annotated[float, Meta(gt=0, description="Seconds of one tool call")] = 60.0
    step: Annotated[float, Meta(gt=0, description="Seconds of one step, all its tool calls included")] = 120.0
    action: Annotated[float, Meta(gt=0, description="Seconds to wait for an action")] = 300.0
    verify: Annotated[float, Meta(gt=0, description="Seconds to grade the episode")] = 120.0
    close: Annotated[float, Meta(gt=0, description="Seconds to close the environment")] = 30.0
    idle: Annotated[float, Meta(gt=0, description="Seconds between calls of a session")] = 1800.0
    episode: Annotated[float, Meta(gt=0, description="Seconds of the whole episode, from its request")] = 3600.0
    grace: Annotated[float, Meta(gt=0, description="Seconds after the deadline until the requester closes the episode")] = 30.0
    drain: Annotated[float, Meta(gt=0, description="Seconds to finish or hand back episodes when a worker stops")] = 60.0
    late: Annotated[float, Meta(gt=0, description="Seconds to wait for an action before the log is read for it")] = 1.0
    ungraded_episodes: Annotated[
        int,
        Meta(
            ge=0,
            description="Episodes in a row without a grade after which `up` ends the run; once one was graded, not before "
            "limits.no_progress, too; 0: never",
        ),
    ] = 64
    no_progress: Annotated[
        float,
        Meta(ge=0, description="Seconds without anything sampled, graded or trained until `up` ends the run; 0: never"),
    ] = 600.0
    silent_worker: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds without a heartbeat, while others are heard, after which `up` kills a worker of its own and "
            "starts it again; 0: never",
        ),
    ] = 120.0


class InferenceSettings(Settings, frozen=True, kw_only=True):
    """Inference workers."""

    workers: Annotated[int, Meta(ge=1, description="Inference workers that `up` starts")] = 1
    engine: Annotated[
        EngineName,
        Meta(
            description="Engine: torch or vLLM in the worker process, OpenAI-compatible servers (chat: what is not trained), "
            "or a Tinker service"
        ),
    ] = "torch"
    purpose: Annotated[
        Literal["train", "evaluate"],
        Meta(description="evaluate also allows engines without log-probabilities or weight updates"),
    ] = "train"
    frozen: Annotated[bool, Meta(description="Serve the model as it is, as a policy that nobody trains")] = False
    versions_of: Annotated[
        str, Meta(description="Policy whose versions to serve, each turn the one that it asks for: an opponent of a league")
    ] = ""
    urls: Annotated[str, Meta(description="Base URLs of the servers of engines openai and chat, separated by commas")] = ""
    served_model_name: Annotated[str, Meta(description="Model name to request from servers (default: their first)")] = ""
    python: Annotated[
        str, Meta(description="Python interpreter of the inference workers that `up` starts (default: this one)")
    ] = ""
    dtype: Annotated[
        Literal["float32", "bfloat16", "auto"],
        Meta(description="Data type of engines vllm and torch; auto with torch: bfloat16 if the processor or GPU has it"),
    ] = "float32"
    device: Annotated[
        str,
        Meta(
            pattern=DEVICE, title=DEVICES, description="Device of engine torch: cpu, cuda, cuda:1; auto: a GPU if there is one"
        ),
    ] = "cpu"
    head_dtype: Annotated[
        Literal["float32", "model"],
        Meta(description="Data type in which engine vllm computes logits: float32, as the trainer does, or that of the model"),
    ] = "float32"
    scratch: Annotated[
        str, Meta(description="Writable folder for the engine's copies of weights (default: in the run's folder)")
    ] = ""
    kv_cache_mib: Annotated[
        int, Meta(ge=0, description="KV cache of engine vllm, in MiB; 0: 512 on a CPU, 90 % of a GPU's memory")
    ] = 0
    kv_cache_after_swap: Annotated[
        Literal["flush", "keep"],
        Meta(
            description="What engine vllm does with the keys and values of turns that run when new weights come: compute them "
            "again, or continue from them (log-probabilities then differ from the trainer's)"
        ),
    ] = "flush"
    vllm: Annotated[
        str,
        Meta(
            description="Further arguments of engine vllm, as a JSON object or the table [inference.vllm], such as "
            '{"tensor_parallel_size": 2}'
        ),
    ] = ""
    reasoning: Annotated[
        Literal["keep", "template", "refuse"],
        Meta(
            description="With a template that drops earlier reasoning: keep the sampled text, drop it as the template does "
            "(a new segment), or refuse the model"
        ),
    ] = "keep"
    thinking: Annotated[
        Literal["auto", "on", "off"], Meta(description="Value of enable_thinking for a template that has it; auto: not set")
    ] = "auto"
    max_num_seqs: Annotated[int, Meta(ge=1, description="Maximum number of sequences decoded in one batch")] = 32
    slots: Annotated[int, Meta(ge=2, description="Observations held at a time, half of them from the worker's own lane")] = 64
    max_model_len: Annotated[
        int, Meta(ge=16, description="Context length: maximum number of tokens of prompt and completions")
    ] = 1024
    threads: Annotated[int, Meta(ge=1, description="Threads of the engine")] = 1


class WeightsSettings(Settings, frozen=True, kw_only=True):
    """The way of new versions of the weights from the learner to the engines."""

    store: Annotated[
        str,
        Meta(description="folder: shared files; nats: object store; or a URL that fsspec supports, such as s3://bucket/path"),
    ] = "folder"
    public_url: Annotated[str, Meta(description="URL from which engines read the store's content, such as http://host/w")] = ""
    full_every: Annotated[
        int,
        Meta(ge=1, le=100, description="Every n-th version is published whole, the others as differences; 1: all whole"),
    ] = 1
    transfer: Annotated[
        Literal["files", "collective"],
        Meta(
            description="files: engines read what was written; collective: engines torch and vllm also get it from the "
            "learner while it is written, over a private network (docs/engines.md)"
        ),
    ] = "files"
    transfer_address: Annotated[
        str, Meta(description="Address of the learner that engines connect to with collective: of a private network")
    ] = "127.0.0.1"
    transfer_seconds: Annotated[
        float, Meta(gt=0, description="Seconds after which a collective transfer is given up, and the file is read")
    ] = 60.0


class ArchiveSettings(Settings, frozen=True, kw_only=True):
    """Limits of the recorder's archive. What a learner, or a log that is restored from it, may still need always stays, and
    what leaves the folder is in the store before, where there is one."""

    keep_hours: Annotated[
        float, Meta(ge=0, description="Hours that the archive keeps entries which nobody needs any more; 0: for ever")
    ] = 0.0
    keep_bytes: Annotated[
        int,
        Meta(ge=0, description="Bytes of the archive above which the oldest entries that nobody needs leave it; 0: no limit"),
    ] = 0
    store: Annotated[
        str,
        Meta(description="URL that fsspec supports, such as s3://bucket/path, to which the archive's segments are copied"),
    ] = ""
    store_keep_hours: Annotated[
        float, Meta(ge=0, description="The same as recorder.keep_hours for recorder.store; 0: for ever")
    ] = 0.0
    store_keep_bytes: Annotated[
        int, Meta(ge=0, description="The same as recorder.keep_bytes for recorder.store; 0: no limit")
    ] = 0


class FleetSettings(Settings, frozen=True, kw_only=True):
    """Environments on the Fleet platform; key and address come from FLEET_API_KEY and FLEET_BASE_URL."""

    region: Annotated[str, Meta(description="Region of the instances; empty: the platform chooses")] = ""
    ttl_seconds: Annotated[int, Meta(ge=0, description="Time to live of an instance; 0: the time limit of an episode")] = 0
    heartbeat_seconds: Annotated[
        float, Meta(ge=10, description="Time without a heartbeat after which the platform ends an instance")
    ] = 60.0
    reset_seconds: Annotated[float, Meta(gt=0, description="Seconds to reset an instance; failure is only a warning")] = 10.0
    ready_seconds: Annotated[float, Meta(gt=0, description="Seconds until an instance's tools can be listed")] = 60.0
    verifier: Annotated[
        Literal["platform", "local"], Meta(description="Where verifiers run: on the platform, or in this worker's sandbox")
    ] = "platform"
    partial_reward: Annotated[
        bool, Meta(description='Take "partial" of what a verifier of score 0 returns as a share of the reward')
    ] = False
    partial_reward_printed: Annotated[
        bool, Meta(description="Also read that share off what it printed, where the policy's own text may stand too")
    ] = False
    grid: Annotated[bool, Meta(description="The policy gives screen coordinates on a grid of 1000 by 1000")] = False


class ContainerSettings(Settings, frozen=True, kw_only=True):
    """Servers of environments that come as an image: docker:KIND:IMAGE and kubernetes:KIND:IMAGE."""

    port: Annotated[int, Meta(ge=1, le=65535, description="Port that the server in the container listens on")] = 8000
    memory_bytes: Annotated[int, Meta(ge=1 << 22, description="Memory of one container")] = 2 << 30
    cpus: Annotated[float, Meta(gt=0, description="Processors of one container")] = 1.0
    namespace: Annotated[str, Meta(description="Kubernetes namespace of the Jobs")] = "default"


class EvaluationSettings(Settings, frozen=True, kw_only=True):
    """Held-out evaluation: before the first step, after the last step, and every N steps."""

    episodes: Annotated[int, Meta(ge=0, description="Held-out episodes per evaluation; 0: none")] = 256
    success_threshold: Annotated[float, Meta(description="A reward of at least this counts as a success")] = 1.0
    greedy: Annotated[bool, Meta(description="Also evaluate greedily at the end")] = True
    greedy_start: Annotated[
        bool, Meta(description="Also evaluate greedily before the first step; `up`: yes, unless it is set")
    ] = False
    every: Annotated[int, Meta(ge=0, description="Also evaluate every N steps; 0: never")] = 0
    held_out: Annotated[
        float,
        Meta(
            ge=0,
            lt=1,
            description="Share of the tasks of run.tasks that is kept out of training, one at least and 30 at most per "
            "environment; 0: none, all are trained on",
        ),
    ] = 0.1


class LogSettings(Settings, frozen=True, kw_only=True):
    """Logs on standard error and in the run's folder."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Minimum severity that is logged")] = "info"
    format: Annotated[Literal["console", "json"], Meta(description="Lines for people, or one JSON object per line")] = "console"
    alive: Annotated[
        str, Meta(description="File that a role touches every 10 s while it lives, for a container's probe; empty: none")
    ] = ""


class Configuration(Settings, frozen=True, kw_only=True):
    """The whole configuration; one TOML table per field."""

    run: RunSettings = RunSettings()
    nats: NatsSettings = NatsSettings()
    episode: EpisodeSettings = EpisodeSettings()
    limits: LimitSettings = LimitSettings()
    environment: EnvironmentSettings = EnvironmentSettings()
    inference: InferenceSettings = InferenceSettings()
    learner: LearnerSettings = LearnerSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    trainer: TrainerSettings = TrainerSettings()
    weights: WeightsSettings = WeightsSettings()
    fleet: FleetSettings = FleetSettings()
    tinker: TinkerSettings = TinkerSettings()
    container: ContainerSettings = ContainerSettings()
    reward: RewardSettings = RewardSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    recorder: ArchiveSettings = ArchiveSettings()
    log: LogSettings = LogSettings()
