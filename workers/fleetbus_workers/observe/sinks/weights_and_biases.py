"""Keeps metrics at Weights & Biases."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetbus.errors import UserError
from fleetbus_workers.observe.sinks.base import SinkTarget, group_names


class WandbSink:
    """A run of Weights & Biases, which takes its key from its own login or ``WANDB_API_KEY``.

    Steps are a value of their own, so that one that is trained again after a resume is not refused as out of order. Neither the
    machine's load nor its console or repository is exported.
    """

    def __init__(self, project: str, target: SinkTarget) -> None:
        try:
            import wandb  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError as error:
            raise UserError("Weights & Biases is not installed: pip install wandb") from error
        quiet = wandb.Settings(console="off", x_disable_stats=True, disable_git=True, disable_code=True)
        try:
            self._run: Any = wandb.init(
                project=project,
                name=target.run,
                config=dict(target.configuration),
                dir=_choose_wandb_folder(target.folder),
                settings=quiet,
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise UserError(f"Weights & Biases cannot be reached: {reason} (WANDB_MODE=offline needs no account)") from error
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, time_seconds: float, values: Mapping[str, float], evaluation: str = "") -> None:
        self._run.log({**group_names(values, evaluation), "step": step, "time": time_seconds})

    def close(self) -> None:
        self._run.finish()


def _choose_wandb_folder(folder: Path | None) -> str | None:
    """The run's folder if there is one; None leaves it to W&B, which takes ``WANDB_DIR`` or the working folder."""
    return str(folder) if folder is not None and folder.is_dir() and "WANDB_DIR" not in os.environ else None
