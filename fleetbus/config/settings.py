"""Everything that can be configured, defined once: TOML tables, command-line flags and ``FLEETBUS_*`` variables come from here.

A field ``steps`` of the table ``learner`` is ``[learner] steps = 50`` in TOML, ``--learner-steps 50`` on the command line and
``FLEETBUS_LEARNER_STEPS=50`` in the environment. The annotation's ``description`` is its help. Times are seconds.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

ADMISSION_SHARE = 0.7
"""Share of the log that new requests may fill, by default."""

FULL_SHARE = 0.95
"""A log as full as this refuses larger messages of admitted work too."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table."""


class RunSettings(Settings, frozen=True, kw_only=True):
    """What is trained, and where its files live."""

    name: Annotated[str, Meta(description="Name of the run; the same name again resumes it")] = "default"
    folder: Annotated[str, Meta(description="Folder that holds a folder per run")] = ".fleetbus/runs"
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1, description="Seed of tasks, sampling and training")] = 1
    model: Annotated[str, Meta(description="Hugging Face model folder (default: the built-in starter policy)")] = ""
    tasks: Annotated[str, Meta(description="Tasks file in Fleet JSON (default: the warehouse tasks)")] = ""
    environment: Annotated[
        str,
        Meta(
            description="Environment: warehouse, mcp:module:factory, module:Class, ... (docs/environments.md); KEY=SPEC for "
            "the tasks of one environment key; repeatable"
        ),
    ] = "warehouse"
    policy: Annotated[str, Meta(description="Name of the policy")] = "default"
    pool: Annotated[str, Meta(description="Name of the pool of environment workers")] = "default"


class NatsSettings(Settings, frozen=True, kw_only=True):
    """The broker and the log."""

    url: Annotated[str, Meta(description="Server to use; empty: `up` starts one")] = ""
    auth: Annotated[str, Meta(description="Folder of `fleetbus auth init` with key and certificates; empty: neither")] = ""
    port: Annotated[int, Meta(ge=0, le=65535, description="Port of the server that `up` starts; 0: a free one")] = 0
    sync: Annotated[
        float, Meta(ge=0, description="Seconds of the log that a power failure may lose on that server; 0: none, but slower")
    ] = 1.0
    lanes: Annotated[int, Meta(ge=1, le=10_240, description="Lanes declared per role: the most workers of one role")] = 16
    replicas: Annotated[
        int, Meta(ge=0, le=5, description="Servers that keep a copy of the log; 0: as the server is configured")
    ] = 0
    max_bytes: Annotated[int, Meta(ge=1 << 20, description="Limit of the log in bytes")] = 4 << 30
    admission: Annotated[float, Meta(gt=0, le=1, description="Share of the log that new requests may fill")] = ADMISSION_SHARE


class EpisodeSettings(Settings, frozen=True, kw_only=True):
    """How one episode is played."""

    temperature: Annotated[float, Meta(ge=0, description="Sampling temperature in training")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="Nucleus sampling; training takes 1")] = 1.0
    top_k: Annotated[int, Meta(ge=0, description="Likeliest tokens that may be sampled; training takes 0: all")] = 0
    min_p: Annotated[
        float, Meta(ge=0, le=1, description="Least share of the likeliest token's probability; training takes 0")
    ] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2, description="Penalty of tokens that occurred; training takes 0")] = 0.0
    frequency_penalty: Annotated[
        float, Meta(ge=-2, le=2, description="Penalty of tokens by how often they occurred; training takes 0")
    ] = 0.0
    repetition_penalty: Annotated[
        float, Meta(gt=0, le=10, description="Divisor of the logits of tokens that occurred; training takes 1")
    ] = 1.0
    max_tokens: Annotated[int, Meta(ge=1, description="Maximum number of tokens per turn")] = 64
    max_turns: Annotated[int, Meta(ge=1, description="Maximum number of turns per episode")] = 5
    max_episode_tokens: Annotated[int, Meta(ge=1, description="Maximum number of tokens per episode, including the prompt")] = (
        1024
    )


class LimitSettings(Settings, frozen=True, kw_only=True):
    """Time limits, in seconds, which show up as the outcome's error class; and when `up` ends a run that cannot progress."""

    open: Annotated[float, Meta(gt=0, description="Opening the environment")] = 120.0
    reset: Annotated[float, Meta(gt=0, description="Beginning the episode")] = 120.0
    tool_call: Annotated[float, Meta(gt=0, description="One tool call")] = 60.0
    step: Annotated[float, Meta(gt=0, description="One step, all its tool calls included")] = 120.0
    action: Annotated[float, Meta(gt=0, description="Waiting for an action")] = 300.0
    verify: Annotated[float, Meta(gt=0, description="Grading the episode")] = 120.0
    close: Annotated[float, Meta(gt=0, description="Closing the environment")] = 30.0
    idle: Annotated[float, Meta(gt=0, description="Time between calls of a session")] = 1800.0
    episode: Annotated[float, Meta(gt=0, description="The whole episode, from its request")] = 3600.0
    grace: Annotated[float, Meta(gt=0, description="After the deadline, before the requester closes the episode itself")] = 30.0
    drain: Annotated[float, Meta(gt=0, description="Finishing or handing back episodes when a worker stops")] = 60.0
    late: Annotated[float, Meta(gt=0, description="Wait for an action before the log is read for it")] = 1.0
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
        Meta(ge=0, description="`up` ends a run in which nothing is sampled, graded, trained for so long; 0: never"),
    ] = 600.0


class EnvironmentSettings(Settings, frozen=True, kw_only=True):
    """Environment workers."""

    workers: Annotated[int, Meta(ge=1, description="Environment workers that `up` starts")] = 1
    slots: Annotated[int, Meta(ge=1, description="Episodes at a time per worker")] = 64
    session_slots: Annotated[int, Meta(ge=0, description="Step-wise sessions at a time per worker, besides episodes")] = 64
    max_attempts: Annotated[int, Meta(ge=1, description="Attempts lost with their workers before an episode ends as lost")] = 3
    max_hops: Annotated[int, Meta(ge=1, description="Re-routings of one observation before its episode ends")] = 3
    prompt: Annotated[
        Literal["auto", "compact", "fleet", "template"],
        Meta(description="How tools are described to the policy; auto: compact for the warehouse, fleet elsewhere"),
    ] = "auto"
    parallel_calls: Annotated[
        int, Meta(ge=1, description="Tool calls of one response executed at the same time, with prompt = template")
    ] = 8
    observation_bytes: Annotated[int, Meta(ge=1024, description="Maximum text of one observation, in bytes")] = 32_768
    processes: Annotated[int, Meta(ge=0, description="Maximum number of processes of pool:MODULE:CLASS; 0: one per slot")] = 0
    devices: Annotated[str, Meta(description="Devices assigned in turn to your own environments, such as cuda:0,cuda:1")] = ""
    sandbox: Annotated[
        Literal["auto", "required", "limits"],
        Meta(
            description="Verifiers where nothing isolates: auto runs fleetbus's own, limits runs all with the limits that "
            "there are, required refuses to start"
        ),
    ] = "auto"
    boxes: Annotated[
        Literal["auto", "docker", "sandbox"],
        Meta(description="What Harbor tasks are played in; auto: containers where a Docker engine answers, else the sandbox"),
    ] = "auto"
    warm: Annotated[int, Meta(ge=0, description="Boxes of a Harbor task that wait, started, for its next episodes")] = 0
    max_abs_reward: Annotated[
        float, Meta(gt=0, le=1e12, description="Largest reward, either way; an episode with another one is not trained")
    ] = 1e6
    pass_variables: Annotated[
        str,
        Meta(description="Variables that process:KIND:COMMAND gets besides PATH and the like, comma separated"),
    ] = ""
    task_urls: Annotated[
        str, Meta(description="Servers that a task's config may name, beside those of the spec: URLs, comma separated; *: any")
    ] = ""
    task_variables: Annotated[
        str, Meta(description="Variables whose values a task's config may have sent to its server, comma separated")
    ] = ""
    task_modules: Annotated[
        str, Meta(description="Modules that a task's config may have imported, beside installed plugins; comma separated")
    ] = ""
    images: Annotated[bool, Meta(description="Show the images of environments to a vision model")] = False
    context_tools: Annotated[
        bool, Meta(description="Offer tools that search and page through earlier messages and truncated output")
    ] = False
    context_status: Annotated[bool, Meta(description="End every observation with the turns and tokens used so far")] = False
    output_chars: Annotated[
        int, Meta(ge=500, description="Maximum characters of tool output per message when context tools are offered")
    ] = 10_000
    compaction: Annotated[
        Literal["off", "drop", "summarise"],
        Meta(description="Before a context is full: drop older turns, or have the policy summarise them; off: end the episode"),
    ] = "off"
    compaction_share: Annotated[
        float, Meta(gt=0, lt=1, description="Share of inference.max_model_len that a context fills before it is compacted")
    ] = 0.75
    compaction_turns: Annotated[int, Meta(ge=1, description="Turns that stay when older ones are dropped")] = 4


class InferenceSettings(Settings, frozen=True, kw_only=True):
    """Inference workers."""

    workers: Annotated[int, Meta(ge=1, description="Inference workers that `up` starts")] = 1
    engine: Annotated[
        Literal["torch", "vllm", "openai", "tinker"],
        Meta(description="Engine: torch or vLLM in the worker process, OpenAI-compatible servers, or a Tinker service"),
    ] = "torch"
    purpose: Annotated[
        Literal["train", "evaluate"],
        Meta(description="evaluate also allows engines without log-probabilities or weight updates"),
    ] = "train"
    urls: Annotated[str, Meta(description="Base URLs of the servers of engine openai, separated by commas")] = ""
    served_model_name: Annotated[str, Meta(description="Model name to request from servers (default: their first)")] = ""
    python: Annotated[
        str, Meta(description="Python interpreter of the inference workers that `up` starts (default: this one)")
    ] = ""
    dtype: Annotated[Literal["float32", "bfloat16", "auto"], Meta(description="Data type of engine vllm")] = "float32"
    scratch: Annotated[
        str, Meta(description="Writable folder for the engine's copies of weights (default: in the run's folder)")
    ] = ""
    kv_cache_mib: Annotated[
        int, Meta(ge=0, description="KV cache of engine vllm, in MiB; 0: 512 on a CPU, 90 % of a GPU's memory")
    ] = 0
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


class LearnerSettings(Settings, frozen=True, kw_only=True):
    """The learner."""

    steps: Annotated[int, Meta(ge=1, description="Batches to train")] = 80
    trainer: Annotated[
        Literal["torch", "tinker"],
        Meta(description="Trainer: torch in the learner process, or a Tinker service (table tinker)"),
    ] = "torch"
    groups: Annotated[int, Meta(ge=1, description="Groups per batch")] = 16
    group_size: Annotated[int, Meta(ge=2, description="Episodes per group (per task)")] = 8
    min_group_size: Annotated[int, Meta(ge=2, description="Minimum number of graded episodes for a group to be trained")] = 2
    advantage_estimator: Annotated[
        Literal["grpo", "dr_grpo", "rloo", "maxrl", "grpo_batch"], Meta(description="Advantage estimator")
    ] = "grpo"
    max_staleness: Annotated[int, Meta(ge=0, description="Maximum number of versions between sampling and training")] = 1
    stale_groups: Annotated[
        Literal["drop", "keep", "wait"],
        Meta(description="Groups that are too stale: drop them, train them with a warning, or wait before they become stale"),
    ] = "drop"
    learning_rate: Annotated[float, Meta(gt=0, description="Peak learning rate")] = 3e-4
    min_lr_ratio: Annotated[float, Meta(ge=0, description="Learning rate of the last step as a share of the peak")] = 0.2
    clip_ratio_low: Annotated[float, Meta(gt=0, description="Lower clipping range of the ratio")] = 0.2
    clip_ratio_high: Annotated[float, Meta(gt=0, description="Upper clipping range of the ratio")] = 0.28
    dual_clip: Annotated[
        float, Meta(ge=0, description="Dual-clip bound of the ratio for negative advantages; 0: none, else more than 1")
    ] = 3.0
    warmup_steps: Annotated[int, Meta(ge=0, description="Steps over which the learning rate rises")] = 10
    max_grad_norm: Annotated[float, Meta(gt=0, description="Gradients are clipped to this norm")] = 0.1
    minibatches: Annotated[int, Meta(ge=1, description="Optimizer steps per batch")] = 1
    micro_batch_size: Annotated[int, Meta(ge=1, description="Sequences per forward pass")] = 16
    threads: Annotated[int, Meta(ge=1, description="Threads of the trainer")] = 1
    checkpoint_every: Annotated[int, Meta(ge=1, description="Steps between checkpoints")] = 10
    keep_checkpoints: Annotated[int, Meta(ge=1, description="Checkpoints kept")] = 3
    checkpoint_at_stop: Annotated[
        bool, Meta(description="Store a checkpoint before stopping; false: stop at once, resume from the one before")
    ] = True
    checkpoint_wait: Annotated[
        float, Meta(ge=0, description="Seconds to wait for an unreadable checkpoint, for example while its disk is not mounted")
    ] = 300.0
    restart_from: Annotated[
        str, Meta(description="Resume from the checkpoint of this step, or from `start`; applied once, STEP/2 repeats it")
    ] = ""
    keep_weights: Annotated[int, Meta(ge=2, description="Published weights files kept")] = 4
    archive: Annotated[
        str, Meta(description="The recorder's archive, from which a resumed learner reads entries trimmed from the log")
    ] = ""


class TinkerSettings(Settings, frozen=True, kw_only=True):
    """A Tinker service, for sampling (inference.engine) and training (learner.trainer). Its key comes from TINKER_API_KEY."""

    url: Annotated[str, Meta(description="Base URL of the service; empty: the SDK's own")] = ""
    base_model: Annotated[str, Meta(description="Name of the base model on the service (default: run.model)")] = ""
    rank: Annotated[int, Meta(ge=1, description="Rank of the LoRA adapter that is trained")] = 16
    loss: Annotated[
        Literal["importance_sampling", "ppo", "cispo"],
        Meta(description="Loss function of the service; clips are the learner's"),
    ] = "ppo"


class AlgorithmSettings(Settings, frozen=True, kw_only=True):
    """The objective beyond its clips, and how rewards become advantages. Formulae: `fleetbus/core`."""

    objective: Annotated[Literal["ppo_clip", "gspo", "cispo", "dppo_tv"], Meta(description="Policy-gradient objective")] = (
        "ppo_clip"
    )
    reduction: Annotated[
        Literal["token_mean", "sequence_mean", "sequence_sum", "constant_mean"],
        Meta(description="How token losses are aggregated"),
    ] = "token_mean"
    segment_weight: Annotated[
        Literal["episode", "token", "segment"],
        Meta(description="What counts as one sequence of an episode with several segments: all of it, none, or each segment"),
    ] = "episode"
    loss_scale_factor: Annotated[int, Meta(ge=1, description="Divisor of constant_mean, in tokens")] = 1024
    rollout_correction: Annotated[
        Literal["none", "tis", "tis_sequence", "icepop", "mis_sequence", "geometric", "decoupled"],
        Meta(description="Importance weighting of the mismatch between sampler and trainer"),
    ] = "none"
    rollout_correction_low: Annotated[float, Meta(ge=0, description="Lower bound of the correction")] = 0.5
    rollout_correction_high: Annotated[float, Meta(gt=0, description="Upper bound of the correction")] = 2.0
    old_policy: Annotated[
        Literal["auto", "sampler", "trainer"],
        Meta(
            description="Policy in the denominator of the ratio; auto: the trainer's own with a correction, else the sampler's"
        ),
    ] = "auto"
    kl_coefficient: Annotated[float, Meta(ge=0, description="Weight of the KL; 0: none")] = 0.0
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], Meta(description="KL estimator")] = "k3"
    kl_place: Annotated[Literal["loss", "reward"], Meta(description="Where the KL enters")] = "loss"
    kl_reference: Annotated[
        Literal["sampler", "start"], Meta(description="Reference policy of the KL: the sampler, or the initial model")
    ] = "sampler"
    credit_assignment: Annotated[Literal["episode", "turn"], Meta(description="One advantage per episode, or one per turn")] = (
        "episode"
    )
    turn_discount: Annotated[float, Meta(ge=0, le=1, description="Discount per turn, with credit per turn")] = 1.0
    dynamic_sampling: Annotated[bool, Meta(description="Replace groups whose rewards are all equal")] = False
    dynamic_sampling_batches: Annotated[
        int, Meta(ge=1, description="Maximum number of batches of such groups replaced per step; further ones are trained")
    ] = 10
    mask_truncated_completions: Annotated[
        bool, Meta(description="Leave truncated episodes out of the loss; they still count in the mean of their group")
    ] = False
    truncated_when: Annotated[
        Literal["outcome", "no_end_token"],
        Meta(
            description="What counts as truncated: the outcome, or a last response without its end token (TRL's and "
            "SkyRL's rule)"
        ),
    ] = "outcome"
    overlong_buffer: Annotated[int, Meta(ge=0, description="Tokens before the limit with a soft overlong penalty; 0: none")] = 0
    overlong_penalty_factor: Annotated[float, Meta(ge=0, description="Largest soft overlong penalty")] = 1.0

    @property
    def truncation_mask(self) -> Literal["", "outcome", "no_end_token"]:
        """Which truncated episodes are left out of the loss; empty: none."""
        return self.truncated_when if self.mask_truncated_completions else ""


class TrainerSettings(Settings, frozen=True, kw_only=True):
    """The torch trainer."""

    epochs: Annotated[int, Meta(ge=1, description="Passes over each batch")] = 1
    lr_scheduler_type: Annotated[Literal["linear", "cosine", "constant"], Meta(description="Decay of the learning rate")] = (
        "linear"
    )
    weight_decay: Annotated[float, Meta(ge=0, description="Weight decay of AdamW")] = 0.0
    packing: Annotated[bool, Meta(description="Put several sequences in one row instead of padding")] = False
    token_budget: Annotated[int, Meta(ge=0, description="Most tokens per forward pass, padding included; 0: no limit")] = 0
    max_tokens: Annotated[int, Meta(ge=0, description="Longer sequences are truncated at their end; 0: never")] = 0
    processes: Annotated[
        int, Meta(ge=0, description="Processes that share the model under `up`; 0: one per GPU of the learner, one on a CPU")
    ] = 0
    device: Annotated[str, Meta(description="Device: cpu, cuda, cuda:1; auto: a GPU if there is one")] = "cpu"
    precision: Annotated[Literal["float32", "bfloat16"], Meta(description="Precision of computation; weights stay float32")] = (
        "float32"
    )
    published_dtype: Annotated[
        Literal["float32", "bfloat16"],
        Meta(description="Precision of published weights; bfloat16: half the size, smaller differences"),
    ] = "float32"
    attention: Annotated[
        Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"],
        Meta(description="Attention implementation of transformers; auto: its own choice for the model"),
    ] = "auto"
    gradient_checkpointing: Annotated[bool, Meta(description="Recompute activations instead of storing them")] = False
    lora_rank: Annotated[int, Meta(ge=0, description="Rank of LoRA adapters; 0: train all weights")] = 0
    lora_alpha: Annotated[float, Meta(gt=0, description="Scale of LoRA adapters, divided by their rank")] = 32.0
    lora_target_modules: Annotated[
        str, Meta(description="Modules with adapters, comma separated; all-linear: all but the head")
    ] = "all-linear"


class WeightsSettings(Settings, frozen=True, kw_only=True):
    """How new versions of the weights travel from the learner to the engines."""

    store: Annotated[
        str,
        Meta(description="folder: shared files; nats: object store; or a URL that fsspec supports, such as s3://bucket/path"),
    ] = "folder"
    public_url: Annotated[str, Meta(description="URL from which engines read the store's content, such as http://host/w")] = ""
    full_every: Annotated[
        int, Meta(ge=1, description="Every n-th version is published whole, the others as differences; 1: all whole")
    ] = 1


class FleetSettings(Settings, frozen=True, kw_only=True):
    """Environments on the Fleet platform; key and address come from FLEET_API_KEY and FLEET_BASE_URL."""

    region: Annotated[str, Meta(description="Region of the instances; empty: the platform chooses")] = ""
    ttl_seconds: Annotated[int, Meta(ge=0, description="Time to live of an instance; 0: the time limit of an episode")] = 0
    heartbeat_seconds: Annotated[
        float, Meta(ge=10, description="Time without a heartbeat after which the platform ends an instance")
    ] = 60.0
    reset_seconds: Annotated[float, Meta(gt=0, description="Resetting an instance; failure is only a warning")] = 10.0
    ready_seconds: Annotated[float, Meta(gt=0, description="Until an instance's tools can be listed")] = 60.0
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
    every: Annotated[int, Meta(ge=0, description="Also evaluate every N steps; 0: never")] = 0


class LogSettings(Settings, frozen=True, kw_only=True):
    """Logs on standard error and in the run's folder."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Minimum severity that is logged")] = "info"
    format: Annotated[Literal["console", "json"], Meta(description="Lines for people, or one JSON object per line")] = "console"


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
    evaluation: EvaluationSettings = EvaluationSettings()
    log: LogSettings = LogSettings()
