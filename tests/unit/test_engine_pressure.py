"""The number of episodes that are out at a time: cut at once where caches overflow, raised again where they have room."""

from __future__ import annotations

from fleetbus.core.training.engine_pressure import ADJUST_SECONDS, MOST_ENGINES, EnginePressure
from fleetbus_schemas import EngineLoad


class Engines:
    """Two engines of a run with 16 to 256 episodes, looked at whenever the number may change."""

    def __init__(self) -> None:
        self.pressure = EnginePressure(least=16, most=256)
        self.now = 0.0

    def look(self, use: float | None, *, out: int = 256, preemptions: int = 0) -> int:
        self.now += ADJUST_SECONDS
        for worker in ("a", "b"):
            self.pressure.record(worker, EngineLoad(running=1, kv_cache_use=use, preemptions=preemptions), self.now)
        self.pressure.adjust(out, self.now)
        return self.pressure.limit


def test_full_caches_cut_the_number_and_empty_ones_raise_it_to_where_it_was() -> None:
    engines = Engines()
    assert engines.look(0.7) == 256
    assert [engines.look(0.95), engines.look(0.95, out=230)] == [230, 207]
    assert engines.pressure.reason == "a cache is 95% full"
    assert engines.look(0.8, out=207) == 207, "between the bounds it stays"
    assert [engines.look(0.5, out=207), engines.look(0.5, out=256), engines.look(0.5)] == [256, 256, 256]


def test_preemptions_cut_by_more_and_count_from_the_first_time_on() -> None:
    engines = Engines()
    assert engines.look(0.7, preemptions=40) == 256, "they are from before"
    assert engines.look(0.7, preemptions=43) == 204
    assert engines.pressure.reason == "6 requests lost their place in a cache"
    assert engines.look(0.7, preemptions=43, out=204) == 204
    assert engines.look(0.7, preemptions=0, out=204) == 204, "the engine began again"


def test_a_number_that_holds_nobody_back_is_not_raised() -> None:
    engines = Engines()
    assert engines.look(0.95, out=100) == 90
    assert engines.look(0.2, out=40) == 90


def test_a_group_is_always_let_out_and_engines_that_say_nothing_change_nothing() -> None:
    engines = Engines()
    assert engines.look(None, out=1) == 256
    assert [engines.look(0.99, out=1) for _ in range(3)] == [16] * 3


def test_it_is_changed_no_more_often_than_a_change_can_show_and_lost_engines_do_not_count() -> None:
    engines = Engines()
    engines.look(0.95)
    engines.pressure.record("a", EngineLoad(kv_cache_use=0.99), engines.now + 1)
    assert not engines.pressure.adjust(256, engines.now + 1) and engines.pressure.limit == 230
    assert not engines.pressure.adjust(256, engines.now + 60)


def test_of_engines_that_were_not_heard_of_lately_nothing_is_kept_and_of_the_others_only_so_many() -> None:
    engines = Engines()
    for start in range(3):
        for number in range(MOST_ENGINES + 10):
            engines.pressure.record(f"{start}-{number}", EngineLoad(kv_cache_use=0.7, preemptions=1), engines.now)
        assert len(engines.pressure._heard) <= MOST_ENGINES
        engines.look(0.7, preemptions=start)
    assert len(engines.pressure._preemptions) <= MOST_ENGINES
    assert not [worker for worker in engines.pressure._preemptions if worker.startswith("0-")]
    assert engines.pressure.limit == int(256 * 0.8 * 0.8), "those that are heard of last are counted still"
