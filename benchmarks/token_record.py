"""The token record's price: CPU time and bytes for each trained token, beside a trainer that keeps none.

    python benchmarks/token_record.py --json

One trainer with `learner.keep_token_records` and one without train the same batches in turn, of the shipped starter's size;
``cpu_ratio`` is the median over rounds of the CPU time with, the writing of the file included, over that without.
``bytes_per_token`` is the file's, ``log_bytes_per_token`` what the ids and log-probabilities of the sampler take in the log.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from benchmarks.trainer_tokens import make_batch, make_model
from fleetbus.config.settings import LearnerSettings, TrainerSettings
from fleetbus.recording.token_record import SUFFIX
from fleetbus_schemas.tokens import TOKEN_BYTES
from fleetbus_workers.learner.token_records import TokenRecords
from fleetbus_workers.learner.torch.settings import TorchTrainerSettings
from fleetbus_workers.learner.torch.trainer import TorchTrainer


def measure(rounds: int, width: int, layers: int) -> dict[str, float]:
    batch = make_batch()
    tokens = sum(int(sequence.loss_mask.sum()) for sequence in batch)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder, width, layers)
        trainers = {
            keep: TorchTrainer(
                folder,
                settings=TorchTrainerSettings(
                    learner=LearnerSettings(keep_token_records=keep), trainer=TrainerSettings(packing=True, token_budget=512)
                ),
            )
            for keep in (0, 1)
        }
        records, seconds = TokenRecords(folder / "tokens", keep=1), {keep: list[float]() for keep in trainers}
        for number in range(1, rounds + 2):
            for keep, trainer in sorted(trainers.items(), reverse=number % 2 == 1):
                began = time.process_time()
                trainer.train(batch, version=0, progress=0.0)
                if keep:
                    records.write("l1", number, trainer.traced_tokens, version=0)
                seconds[keep].append(time.process_time() - began)
        (file,) = (folder / "tokens").glob(f"*{SUFFIX}")
        size = file.stat().st_size
    pairs = list(zip(seconds[1][1:], seconds[0][1:], strict=True))
    return {
        "parameters": sum(parameter.numel() for parameter in trainers[0]._model.parameters()),
        "tokens": tokens,
        "cpu_ratio": round(statistics.median(one / other for one, other in pairs), 3),
        "cpu_us_per_token": round(statistics.median(one - other for one, other in pairs) / tokens * 1e6, 2),
        "bytes_per_token": round(size / tokens, 2),
        "log_bytes_per_token": 2 * TOKEN_BYTES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    arguments = parser.parse_args()
    for width, layers in ((128, 4), (256, 4)):
        row = measure(arguments.rounds, width, layers)
        text = msgspec.json.encode(row).decode() if arguments.json else "  ".join(f"{k} {v}" for k, v in row.items())
        print(text, flush=True)


if __name__ == "__main__":
    main()
