"""Segments in the embedded engine: one that keeps tokens of another finds their keys and values, and samples the same."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.support.torch_engine import SYSTEM, ask, draw_ids, open_engine


async def test_a_segment_that_keeps_tokens_of_its_parent_computes_only_the_others(folder: Path) -> None:
    first = ask(SYSTEM + draw_ids(1, 30), tokens=10)
    kept = SYSTEM + draw_ids(1, 30)[:20]
    leaving = msgspec.structs.replace(ask(kept + draw_ids(2, 15), seed=3), segment=1, parent=0)
    async with open_engine(folder, cached_prompts=0) as sampler:
        await sampler.generate(first)
        before = sampler.stats
        begun = await sampler.generate(leaving)
        after = sampler.stats
        assert after["cached_tokens"] - before["cached_tokens"] == len(kept)
        assert after["prefill_tokens"] - before["prefill_tokens"] == 15
        resumed = await sampler.generate(ask([*first.ids, 1, 2, 3], seed=4))
        assert sampler.stats["cached_tokens"] - after["cached_tokens"] >= len(first.ids), "its parent is still kept"
    async with open_engine(folder, cached_prompts=0) as alone:
        assert (await alone.generate(ask(list(leaving.ids), seed=3))).ids == begun.ids
        assert (await alone.generate(ask([*first.ids, 1, 2, 3], seed=4, key="other"))).ids == resumed.ids
