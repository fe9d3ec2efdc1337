"""Paths of the files of a run, ``<run.folder>/<run.name>/``. Paths only, and the configuration of the run's last start."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fleetbus.config.load import read_tables
from fleetbus.config.seats import POLICIES, list_joined_policies
from fleetbus.config.settings import RunSettings
from fleetbus_schemas.names import is_name


class RunFolder(msgspec.Struct, frozen=True):
    """The files of one run below ``path``."""

    path: Path

    @property
    def store(self) -> Path:
        """JetStream's folder when `up` starts the server."""
        return self.path / "nats"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def weights(self) -> Path:
        """Published versions of the policy."""
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokens(self) -> Path:
        """Token records: of each trained token what the trainer thought of it."""
        return self.path / "tokens"

    @property
    def text_index(self) -> Path:
        """The index for full-text search, which may be deleted."""
        return self.path / "text.sqlite"

    @property
    def model(self) -> Path:
        """The model that `from_pretrained` loads, written when training finishes."""
        return self.path / "model"

    @property
    def configuration(self) -> Path:
        """The effective configuration, without secrets; what role processes are started with."""
        return self.path / "config.json"

    @property
    def identity(self) -> Path:
        """The identity of the run: model, tasks, environment, seed."""
        return self.path / "run.json"

    @property
    def server(self) -> Path:
        """The address of the run's own server, while `up` runs."""
        return self.path / "server.json"

    @property
    def port(self) -> Path:
        """The port that the run's own server had last: used again when the run is resumed."""
        return self.path / "port"

    @property
    def lock(self) -> Path:
        """Held by the `up` that drives the run."""
        return self.path / "lock"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def picture(self) -> Path:
        return self.path / "reward.png"


def run_folder(run: RunSettings) -> RunFolder:
    """The folder of a run, whether it exists or not."""
    return RunFolder(Path(run.folder).expanduser() / run.name)


def policy_folder(run: RunSettings) -> RunFolder:
    """The folder of what its policy leaves: the run's, or one of its own if the policy is that of a trained seat."""
    folder = run_folder(run)
    return policy_folder_below(folder, run.policy) if run.policy in list_joined_policies(run) else folder


def policy_folder_below(folder: RunFolder, policy: str) -> RunFolder:
    """The folder, in that of a run, of what the policy of a trained seat leaves."""
    return RunFolder(folder.path / POLICIES / policy)


def read_earlier_configuration(run: RunSettings) -> dict[str, object] | None:
    """The tables that the run was last started with on this machine, or None; None, too, for what is no name of a run."""
    if not is_name(run.name):
        return None
    file = run_folder(run).configuration
    return read_tables(file) if file.is_file() else None
