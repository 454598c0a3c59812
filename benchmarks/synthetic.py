"""Measure what a CNN learns from a run's synthetic images alone, for results/synthetic.md.

    python benchmarks/synthetic.py synthetic.csv --data FOLDER --seeds 10,11,12,13,14

Each seed makes a run of experiment=mnist_dp_teacher at a proven epsilon of 1, writes images with
its student's labels, and trains a CNN on them, with the run's seed.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import pandas

import fed_dpsd
from fed_dpsd.server.run_folder import versions

SIZES = 10_000, 30_000
SOURCE = ("experiment=mnist_dp_teacher", "privacy.target_epsilon=1")
CNN = ("method=central", "training=plain", "model=cnn", "data=mnist")


def main() -> None:
    """Measure each seed, and write the CSV after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder of MNIST's parquet files")
    parser.add_argument("--seeds", default="10,11,12,13,14")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in options.seeds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(Path(folder), options.data.absolute(), int(seed))
        print(rows[-len(SIZES) :])
        pandas.DataFrame(rows).to_csv(options.csv, index=False, lineterminator="\n")


def measure(folder: Path, data: Path, seed: int) -> list[dict[str, Any]]:
    """Return the rows of a seed: accuracies on the test split after the last round."""
    common = f"seed={seed}", "threads_server=1"
    source = fed_dpsd.run(
        *SOURCE, f"data.path={data}", f"out={folder / 'source'}", *common, progress=False
    )
    rows, found = [], versions()
    for size in SIZES:
        drawn = folder / f"{size}"
        source.synthesize(size, drawn / "train.parquet", labels=True)
        (drawn / "test.parquet").symlink_to(data / "test.parquet")
        out = f"out={folder / f'cnn{size}'}"
        cnn = fed_dpsd.run(*CNN, f"data.path={drawn}", out, *common, progress=False)
        rows.append(
            {
                "experiment": "mnist_dp_teacher",
                "seed": seed,
                "images": size,
                "record_add_remove": source.privacy.epsilon("record", "add_remove").value,
                "student": source.summary["accuracy"]["student"],
                "cnn": cnn.summary["accuracy"]["student"],
                "commit": found["commit"],
                "machine": found["machine"],
            }
        )
    return rows


if __name__ == "__main__":
    main()
