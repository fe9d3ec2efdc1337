"""The tables of the configuration that decide how a policy is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from fleetbus.config.table import Settings

DEVICE, DEVICES = r"^(auto|cpu|mps|cuda(:\d{1,3})?)$", "auto, cpu, cuda, or a GPU by its number, such as cuda:1"
"""Names of torch's devices as a pattern and in words."""


class LearnerSettings(Settings, frozen=True, kw_only=True):
    """The learner."""

    steps: Annotated[int, Meta(ge=1, description="Training steps, each of one batch")] = 80
    trainer: Annotated[
        Literal["torch", "tinker"],
        Meta(description="Trainer: torch in the learner process, or a Tinker service (table tinker)"),
    ] = "torch"
    groups: Annotated[int, Meta(ge=1, description="Groups per batch")] = 16
    group_size: Annotated[int, Meta(ge=2, description="Episodes per group (per task)")] = 8
    min_group_size: Annotated[int, Meta(ge=2, description="Minimum number of graded episodes for a group to be trained")] = 2
    advantage_estimator: Annotated[
        Literal["grpo", "dr_grpo", "rloo", "maxrl", "grpo_batch", "reinforce_plus_plus", "gae", "none"],
        Meta(description="Advantage estimator; gae: of a critic (PPO); none: 0 for all, as for distillation alone"),
    ] = "grpo"
    max_staleness: Annotated[int, Meta(ge=0, description="Maximum number of versions between sampling and training")] = 1
    stale_groups: Annotated[
        Literal["drop", "keep", "wait"],
        Meta(description="Groups that are too stale: drop them, train them with a warning, or wait before they become stale"),
    ] = "wait"
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
        str,
        Meta(description="Resume from the checkpoint of this step, or from `start`; done once: STEP/2 does it again"),
    ] = ""
    begin_with: Annotated[
        str,
        Meta(description="Folder of a checkpoint of another run: begin with its weights and optimizer (fleetbus fork sets it)"),
    ] = ""
    requested_by: Annotated[
        str,
        Meta(
            description="Policy whose learner asks for the episodes of which this one trains the seats of its own policy; "
            "empty: this one asks for its own (up sets it for a seat that is trained)"
        ),
    ] = ""
    keep_weights: Annotated[int, Meta(ge=2, description="Published weights files kept")] = 4
    keep_token_records: Annotated[
        int, Meta(ge=0, description="Newest steps whose log-probabilities by the trainer are kept, token by token; 0: none")
    ] = 1000
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
        Meta(description="Loss function of the service; clipping ranges are those of the table learner"),
    ] = "ppo"


class AlgorithmSettings(Settings, frozen=True, kw_only=True):
    """The objective beyond its clips, and how rewards become advantages. Formulae: `fleetbus/core`."""

    objective: Annotated[Literal["ppo_clip", "gspo", "cispo", "dppo_tv"], Meta(description="Policy-gradient objective")] = (
        "ppo_clip"
    )
    reduction: Annotated[
        Literal["token_mean", "sequence_mean", "sequence_sum", "constant_mean"],
        Meta(description="How token losses are aggregated"),
    ] = "sequence_mean"
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
    kl_ratio_weight: Annotated[
        bool,
        Meta(description="Multiply the KL in the loss by the ratio, as TRL does: its gradient is then that of the KL"),
    ] = False
    kl_reference: Annotated[
        Literal["sampler", "start", "moving"],
        Meta(
            description="What the KL pulls to: sampler, the policy that sampled the tokens (bounds a step); start, the model "
            "of the run's start, as with TRL, verl and SkyRL (bounds the run; a second model in memory); moving, one that "
            "begins there and follows the policy, as TRL's sync_ref_model (ends the circling of self-play; also a second model)"
        ),
    ] = "sampler"
    reference_sync_steps: Annotated[
        int, Meta(ge=1, description="With kl_reference = moving: steps from one move of the reference to the next")
    ] = 1
    reference_mixup_alpha: Annotated[
        float,
        Meta(gt=0, le=1, description="With kl_reference = moving: share of the policy in the reference after each move"),
    ] = 0.05
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
    entropy_coefficient: Annotated[float, Meta(ge=0, description="Weight of the entropy bonus; 0: none")] = 0.0
    teacher: Annotated[
        str, Meta(description="Model folder whose log-probabilities are distilled, on the policy's own samples; empty: none")
    ] = ""
    teacher_coefficient: Annotated[float, Meta(gt=0, description="Weight of the distillation beside the rewards")] = 1.0
    gae_lambda: Annotated[float, Meta(ge=0, le=1, description="Lambda of gae; 1: the return less the critic's value")] = 1.0
    value_clip: Annotated[float, Meta(ge=0, description="Clipping range of the critic's values; 0: none")] = 0.2
    critic_rate: Annotated[float, Meta(gt=0, description="Learning rate of the critic, as a multiple of the policy's")] = 1.0
    loss: Annotated[
        str, Meta(description="Your own objective in place of algorithm.objective, as MODULE:FUNCTION; see docs/algorithms.md")
    ] = ""
    advantage: Annotated[
        str, Meta(description="Your own estimator in place of learner.advantage_estimator, as MODULE:FUNCTION")
    ] = ""
    overlong_buffer: Annotated[int, Meta(ge=0, description="Tokens before the limit with a soft overlong penalty; 0: none")] = 0
    overlong_penalty_factor: Annotated[float, Meta(ge=0, description="Largest soft overlong penalty")] = 1.0

    @property
    def truncation_mask(self) -> Literal["", "outcome", "no_end_token"]:
        """The truncated episodes that are left out of the loss; empty: none."""
        return self.truncated_when if self.mask_truncated_completions else ""

    @property
    def pulls_to_a_model(self) -> bool:
        """True if the KL pulls to another model than the one that sampled."""
        return bool(self.kl_coefficient) and self.kl_reference != "sampler"


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
    shard_processes: Annotated[
        int, Meta(ge=0, description="Processes that one copy of the model is sharded over, such as those of a node; 0: all")
    ] = 0
    device: Annotated[
        str,
        Meta(pattern=DEVICE, title=DEVICES, description="Device: cpu, cuda, cuda:1; auto: a GPU if there is one"),
    ] = "cpu"
    precision: Annotated[
        Literal["float32", "bfloat16", "auto"],
        Meta(description="Precision of computation; weights stay float32; auto: bfloat16 on a GPU or if the processor has it"),
    ] = "float32"
    head_precision: Annotated[
        Literal["float32", "bfloat16"],
        Meta(description="Precision of the logits where trainer.precision is bfloat16; engines have inference.head_dtype"),
    ] = "float32"
    published_dtype: Annotated[
        Literal["float32", "bfloat16"],
        Meta(description="Precision of published weights; bfloat16: half the size, smaller differences"),
    ] = "float32"
    published_weights: Annotated[
        Literal["merged", "adapters"],
        Meta(description="With LoRA: publish the model with adapters merged, or adapters alone (engines torch, vllm)"),
    ] = "merged"
    attention: Annotated[
        Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"],
        Meta(description="Attention implementation of transformers; auto: its own choice for the model"),
    ] = "auto"
    gradient_checkpointing: Annotated[bool, Meta(description="Recompute activations instead of storing them")] = False
    offload_optimizer: Annotated[
        bool,
        Meta(description="Keep AdamW's numbers in the CPU's memory and compute its steps there"),
    ] = False
    saved_model: Annotated[
        Literal["policy", "reference"],
        Meta(
            description="What the folder model of a finished run holds: the policy, or with algorithm.kl_reference = moving "
            "the reference, which is a mean of the run's policies; what is sampled with is the policy in either case"
        ),
    ] = "policy"
    lora_rank: Annotated[int, Meta(ge=0, description="Rank of LoRA adapters; 0: train all weights")] = 0
    lora_alpha: Annotated[float, Meta(gt=0, description="Scale of LoRA adapters, divided by their rank")] = 32.0
    lora_target_modules: Annotated[
        str, Meta(description="Modules with adapters, comma separated; all-linear: all but the head")
    ] = "all-linear"


class RewardSettings(Settings, frozen=True, kw_only=True):
    """The parts of a reward: the environment's verdict, its named components, a judge. The judge's key: JUDGE_API_KEY."""

    weights: Annotated[
        str, Meta(description="NAME=WEIGHT, comma separated: verifier, judge, components of verdicts (default: 1 for both)")
    ] = ""
    judge_url: Annotated[str, Meta(description="OpenAI-compatible server of a judge, as http://host:8000; empty: none")] = ""
    judge_model: Annotated[str, Meta(description="Model to request from it (default: its first)")] = ""
    judge_rubric: Annotated[str, Meta(description="Text file that says what to grade and how")] = ""
    judge_mode: Annotated[
        Literal["absolute", "group"],
        Meta(description="Judge each episode alone, or all of a group beside each other before they are trained"),
    ] = "absolute"
    judge_seconds: Annotated[float, Meta(gt=0, description="Seconds for one answer, retries included; then no grade")] = 60.0
    judge_concurrency: Annotated[int, Meta(ge=1, description="Requests to the judge at a time, per worker")] = 16
    judge_max_tokens: Annotated[int, Meta(ge=16, description="Maximum number of tokens of its answer")] = 1024
    judge_max_chars: Annotated[
        int, Meta(ge=1000, description="Maximum characters of one transcript; a longer one loses its middle")
    ] = 60_000
    judge_cache: Annotated[str, Meta(description="Folder that keeps its answers by content (default: in memory)")] = ""
