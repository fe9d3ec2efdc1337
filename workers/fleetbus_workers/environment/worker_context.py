"""The state that all episodes of one environment worker, gateway or host of sessions share."""

from collections.abc import Callable

import msgspec

from fleetbus.bus.base import Bus
from fleetbus.concurrency.loop_clock import get_clock
from fleetbus.config.settings import EnvironmentSettings, LimitSettings
from fleetbus_schemas import ChatMessage, Subjects, Task
from fleetbus_workers.environment.base import Environment


class WorkerContext(msgspec.Struct, frozen=True, kw_only=True):
    """The state that all attempts of one worker share. ``make`` makes the environment of an episode; ``nonce`` names one claim.
    ``context_tokens`` is what the model takes, 0: as many as an episode may have; ``examples`` stand before
    each task; ``now`` the loop's clock."""

    bus: Bus
    subjects: Subjects
    worker: str
    lane: str
    settings: EnvironmentSettings
    limits: LimitSettings
    make: Callable[[Task], Environment]
    nonce: Callable[[], str]
    context_tokens: int = 0
    examples: tuple[ChatMessage, ...] = ()
    now: Callable[[], float] = msgspec.field(default_factory=get_clock)
