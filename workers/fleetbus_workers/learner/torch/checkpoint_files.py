"""Writes and reads a model and its optimizer in a checkpoint: each process writes its own shards, beside the training.

The format is that of ``torch.distributed.checkpoint``: it may be read by another number of processes. Beside each file of
shards
stands its SHA-256, made while it was written. Nothing that is read is run: the index of the format is a pickle, of which only
its own classes are taken.
"""

import hashlib
import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fleetbus.errors import UserError
from fleetbus_workers.learner.checkpoints import HASH_SUFFIX
from fleetbus_workers.learner.torch.sharding import Shards

INDEX = ".metadata"
_SHARDS = ".distcp"

State = dict[str, torch.Tensor]
"""Tensors by name, sharded or whole; every process has the same names."""


def start_writing(folder: Path, state: State, shards: Shards) -> Callable[[], None]:
    """Copy ``state`` to the CPU's memory and write the copy below ``folder`` in a thread; every process has to ask. Returns
    what waits until all processes have written, and raises `OSError` if one could not."""
    copied = {name: shards.copy_to_cpu(tensor) for name, tensor in state.items()}
    group = shards.background
    _expect_one_process(group)
    executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=shards.enter_thread)
    future = executor.submit(save, copied, storage_writer=_HashingWriter(folder), process_group=group, no_dist=group is None)
    executor.shutdown(wait=False)

    def wait() -> None:
        with _raise_os_errors():
            future.result()

    return wait


def read_into(folder: Path, state: State, shards: Shards) -> None:
    """Fill the tensors of ``state`` from a checkpoint, written by any number of processes; every process has to ask. Raises
    `OSError` or, when names or shapes are others, `UserError`."""
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} holds no state of this trainer: it was written by another one, or by an earlier version")
    reader = _PlainReader(folder)
    found = reader.read_metadata().state_dict_metadata
    shapes = {name: tuple(getattr(entry, "size", ())) for name, entry in found.items()}
    wrong = sorted(name for name, tensor in state.items() if shapes.get(name) != tuple(tensor.shape))
    if wrong or shapes.keys() - state.keys():
        name = (wrong or sorted(shapes.keys() - state.keys()))[0]
        raise UserError(
            f"{folder} does not fit the model and the settings of this run: {name} has shape {shapes.get(name)} there, "
            f"and {tuple(state[name].shape) if name in state else None} here"
        )
    group = shards.background
    _expect_one_process(group)
    try:
        with _raise_os_errors():
            load(state, storage_reader=_PlainReader(folder), process_group=group, no_dist=group is None)
    except CheckpointException as error:
        if any(isinstance(reason, MemoryError | torch.OutOfMemoryError) for reason, _ in error.failures.values()):
            raise  # nothing is wrong with the checkpoint, and who ended just now may still hold that memory
        reason = next(iter(error.failures.values()))[0]
        raise UserError(f"{folder} cannot be read: {' '.join(str(reason).split())[:200] or type(reason).__name__}") from error


@contextmanager
def _raise_os_errors() -> Iterator[None]:
    """Raise in all processes what failed in one, as the `OSError` that it was."""
    try:
        yield
    except CheckpointException as error:
        for rank, (reason, _) in error.failures.items():
            number = getattr(reason, "errno", None)
            if isinstance(reason, OSError) and number is not None:
                raise OSError(number, f"process {rank}: {reason}") from error
        raise


def _expect_one_process(group: dist.ProcessGroup | None) -> None:
    """One process is what was asked for, and nothing to warn of."""
    if group is None:
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


class _HashingStream(io.IOBase):
    """Writes to ``raw`` and into a hash; only ever appended to."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.digest = hashlib.sha256()

    def write(self, content: Any) -> int:
        self.digest.update(content)
        written: int = self._raw.write(content)
        return written

    def tell(self) -> int:
        position: int = self._raw.tell()
        return position

    def flush(self) -> None:
        self._raw.flush()

    def fileno(self) -> int:
        number: int = self._raw.fileno()
        return number


class _HashingFiles(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as raw:
            if mode != "wb" or not str(path).endswith(_SHARDS):
                yield raw
                return
            stream = _HashingStream(raw)
            yield stream
        Path(f"{path}{HASH_SUFFIX}").write_text(stream.digest.hexdigest())


class _HashingWriter(FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        self.fs = _HashingFiles()


class _MetadataUnpickler(pickle.Unpickler):
    """Takes the classes of the format, shapes and types of tensors, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if _is_plain(module, name) else None
        if found is None:
            raise UserError(f"the checkpoint's {INDEX} names {module}.{name}, which is none of its classes")
        return found


def _is_plain(module: str, name: str) -> bool:
    if module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"):
        return "." not in name and (name[:1].isupper() or name in ("_MEM_FORMAT_ENCODING", "_StorageInfo"))
    if module == "torch":
        return name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
    return (module, name) in (("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"))


class _PlainReader(FileSystemReader):
    def read_metadata(self, *arguments: Any, **named: object) -> Metadata:
        try:
            with (Path(self.path) / INDEX).open("rb") as stream:
                metadata: Metadata = _MetadataUnpickler(stream).load()
            known = [type(entry) for entry in metadata.state_dict_metadata.values()]
            places = {str(part.relative_path) for part in (metadata.storage_data or {}).values()}
        except (OSError, UserError):
            raise
        except Exception as error:  # what a pickle of somebody else makes of the reader, memory included
            raise UserError(f"{self.path}: its {INDEX} cannot be read: {str(error) or type(error).__name__}") from error
        if beyond := sorted(place for place in places if Path(place).name != place):
            raise UserError(f"{self.path}: its {INDEX} names {beyond[0]!r}, which is no file beside it")
        if BytesStorageMetadata in known:  # read by unpickling what is there
            raise UserError(f"{self.path}: it holds what is no tensor")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
