"""The table of the configuration that says what a reward is made of."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from fleetbus.config.table import Settings


class RewardSettings(Settings, frozen=True, kw_only=True):
    """What a reward is made of: the environment's verdict, its named components, a judge. The judge's key: JUDGE_API_KEY."""

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
