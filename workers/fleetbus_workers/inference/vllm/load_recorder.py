"""Records what vLLM's scheduler reports after each step: requests, the use of its cache, preemptions, tokens."""

from typing import Any, Self

from fleetbus_schemas import EngineLoad


class LoadRecorder:
    """A stat logger in vLLM's sense (``StatLoggerBase``, of which only these methods are called), for all the engines of data
    parallelism; outlives restarts of them."""

    def __init__(self) -> None:
        self.sampled_tokens = 0.0
        self._preemptions = 0
        self._schedulers: dict[int, Any] = {}

    @property
    def engine_load(self) -> EngineLoad:
        """See `LoadedSampler.engine_load`; zeros before the first step."""
        found = self._schedulers.values()
        return EngineLoad(
            running=sum(each.num_running_reqs for each in found),
            waiting=sum(each.num_waiting_reqs + each.num_skipped_waiting_reqs for each in found),
            kv_cache_use=max((float(each.kv_cache_usage) for each in found), default=0.0),
            preemptions=self._preemptions,
        )

    def attach(self, vllm_config: Any, engine_index: int = 0) -> Self:
        """To an engine that begins: the factory that vLLM calls."""
        self._schedulers.pop(engine_index, None)
        return self

    def record(self, scheduler_stats: object, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        """Called by vLLM on the event loop, with either or both."""
        if scheduler_stats is not None:
            self._schedulers[engine_idx] = scheduler_stats
        if iteration_stats is not None:
            self.sampled_tokens += iteration_stats.num_generation_tokens
            self._preemptions += iteration_stats.num_preempted_reqs

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...
