"""Writes the token record of each step before the log names it, and removes those of steps that are long past.

A record that cannot be written is missed by who reads the run, and by nobody else: training goes on without it.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import structlog

from fleetbus.files import replace_file
from fleetbus.recording.token_record import SUFFIX, StepTokens, TrainedTokens, build_record_path, digest_record, encode_step
from fleetbus_workers.learner.base import SequenceTokens

log = structlog.get_logger()


class TokenRecords:
    """The records of a run in ``folder``, those of the newest ``keep`` steps; 0: none are written."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def write(self, lineage: str, step: int, tokens: Sequence[SequenceTokens], *, version: int) -> bytes:
        """Write the record of a step that began with weights ``version``; its digest, b"" if none was written. Blocking."""
        if not self._keep or not tokens:
            return b""
        contents = encode_step(StepTokens(lineage=lineage, step=step, episodes=_join_leaves(tokens, version)))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(build_record_path(self._folder, lineage, step), contents)
            self._remove_before(step - self._keep + 1)
        except OSError as error:
            log.warning("token record was not written; training continues without it", step=step, reason=str(error))
            return b""
        return digest_record(contents)

    def _remove_before(self, step: int) -> None:
        for file in self._folder.glob(f"*-s*{SUFFIX}"):
            number = file.name.removesuffix(SUFFIX).rpartition("-s")[2]
            if number.isdecimal() and int(number) < step:
                with suppress(OSError):  # another's, say: the new record counts all the same
                    file.unlink()


def _join_leaves(tokens: Sequence[SequenceTokens], version: int) -> tuple[TrainedTokens, ...]:
    by_episode: dict[str, list[SequenceTokens]] = {}
    for each in tokens:
        by_episode.setdefault(each.episode_id, []).append(each)
    return tuple(
        TrainedTokens(
            episode_id=episode,
            version=version,
            places=np.concatenate([leaf.places for leaf in leaves]).astype("<u4").tobytes(),
            logprobs=np.concatenate([leaf.logprobs for leaf in leaves]).astype("<f4").tobytes(),
            gradients=np.concatenate([leaf.gradients for leaf in leaves]).astype("<f4").tobytes(),
            clipped=np.packbits(np.concatenate([leaf.clipped for leaf in leaves]), bitorder="little").tobytes(),
        )
        for episode, leaves in by_episode.items()
    )
