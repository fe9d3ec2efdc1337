"""The log and token record of a run given to martingale's doctor, and its table beside the one counted here.

    pip install --no-deps --target martingale-0.2.0 martingale==0.2.0
    PYTHONPATH=martingale-0.2.0 python benchmarks/beside_martingale.py runs/RUN
    PYTHONPATH=martingale-0.2.0 python benchmarks/beside_martingale.py logs/old_weights-1.fbrec   # of diagnose_plants.py

Each trained episode becomes a sequence of martingale's record: its sampled tokens with the sampler's log-probabilities and the
version that sampled each, scored by the trainer's. Counted here, directly from the rows, are tokens, mean, mean size and
largest size of the log-ratio by lag (versions between sampling and training). One JSON line per lag, and one with what the
doctor says; exit status 1 if any of the numbers differ by more than rounding.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fleetbus
from fleetbus.recording.reader import read_header
from fleetbus.recording.rows import TokenRow

TOLERANCE = 1e-6


def list_trained(row: TokenRow) -> list[tuple[int, float, int, float]]:
    """Of each trained token its id, the sampler's log-probability, the version and the trainer's log-probability."""
    columns = zip(row.ids, row.logprobs, row.versions, row.trainer_logprobs, strict=True)
    return [each for each in columns if not math.isnan(each[3])]


def write_record(rows: list[TokenRow], folder: Path) -> None:
    """Martingale's record of rows."""
    from martingale.record.recorder import Recorder
    from martingale.record.revision import SamplerConfig

    recorder, revisions = Recorder(folder), {}
    sampler = SamplerConfig(temperature=1.0, logprobs_mode="processed_logprobs", temperature_applied=True, engine="fleetbus")
    newest = max(row.trained_version for row in rows)
    for version in range(newest + 1):
        digest = f"{version:064x}"
        revisions[version] = recorder.publish_revision(digest, "0" * 64, sampler, step=version)
    for row in rows:
        trained = list_trained(row)
        with recorder.sequence(0, row.episode_id, row.ids[: row.mask.index(True)]) as sequence:
            for token, logprob, version, _ in trained:
                sequence.token(revisions[version].digest, token, logprob)
            sequence.reward(row.reward or 0.0)
        recorder.score(sequence.record.digest, revisions[row.trained_version].digest, [each[3] for each in trained])


def ask_doctor(folder: Path) -> tuple[dict[int, dict[str, float]], list[str]]:
    """Its table by lag, and its words."""
    from martingale.diagnostics import attribute, decompose
    from martingale.diagnostics.staleness import diagnosis
    from martingale.record import TokenLedger

    ledger = TokenLedger(folder / "tokens.db", readonly=True)
    try:
        found = decompose(ledger)
    finally:
        ledger.close()
    names = {"mean": "mean_log_ratio", "mean_size": "mean_abs_log_ratio", "largest": "max_abs_log_ratio"}
    found["attribution"] = attribute(found)
    table = {
        each["lag"]: {"tokens": each["n_tokens"]} | {ours: each["float_informational"][its] for ours, its in names.items()}
        for each in found["by_lag"]
    }
    return table, list(diagnosis(found))


def count(rows: list[TokenRow]) -> dict[int, dict[str, float]]:
    """The same table from the rows."""
    ratios: defaultdict[int, list[float]] = defaultdict(list)
    for row in rows:
        for _, sampler, version, trainer in list_trained(row):
            ratios[row.trained_version - version].append(trainer - sampler)
    return {
        lag: {
            "tokens": len(values),
            "mean": math.fsum(values) / len(values),
            "mean_size": math.fsum(map(abs, values)) / len(values),
            "largest": max(map(abs, values)),
        }
        for lag, values in sorted(ratios.items())
    }


def read_rows(run: str) -> list[TokenRow]:
    """The trained episodes of a runin the order of steps."""
    path = Path(run)
    with tempfile.TemporaryDirectory() as folder:
        if path.suffix == ".fbrec":  # its records lie beside it
            records = Path(folder) / read_header(path).run / "tokens"
            records.parent.mkdir()
            records.symlink_to(path.with_suffix(".tokens").resolve())
            reader = fleetbus.open_run(path, folder=folder)
        else:
            reader = fleetbus.open_run(path.name, folder=path.parent)
        return sorted((row for row in reader.tokens() if row.trainer_logprobs), key=lambda row: row.trained_version)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUNS/RUN|FILE")
    rows = read_rows(parser.parse_args().run)
    with tempfile.TemporaryDirectory() as folder:
        write_record(rows, Path(folder))
        theirs, said = ask_doctor(Path(folder))
    ours, agrees = count(rows), True
    for lag in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(lag, {}), theirs.get(lag, {})
        same = one.keys() == other.keys() and all(
            math.isclose(one[k], other[k], rel_tol=TOLERANCE, abs_tol=TOLERANCE) for k in one
        )
        agrees = agrees and same
        print(json.dumps({"lag": lag, "counted": one, "martingale": other, "same": same}))
    print(json.dumps({"doctor": said}))
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
