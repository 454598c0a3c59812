"""Measure each command's peak of memory on made pictures: data, site check, run, report, predict.

    python benchmarks/memory.py --out FOLDER --pictures 6000 --side 512 -- rounds=3

The pictures are grey PNG files of two classes in FOLDER, and a tenth more of them are for testing.
All else after `--` is an override of `fed-dpsd run`. The first peak is of memory that nothing can
take from the process, seen ten times a second; the second is of all resident memory, with pages of
mapped files, which a system takes back when it needs them.
"""

import argparse
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from fed_dpsd.experiment import from_overrides
from fed_dpsd.models import procedural
from fed_dpsd.rehearsal.sites import site_keys
from fed_dpsd.report.tables import markdown_table

CLASSES = {"areas": procedural.areas, "lines": procedural.lines}


def main() -> None:
    """Make pictures where there are none, run every command, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pictures", type=int, default=6_000)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("overrides", nargs="*", help="after --")
    options = parser.parse_args()
    folder = options.out / f"{options.pictures}x{options.side}"
    make_pictures(folder / "pictures", options.pictures, options.side)
    rows = [measured(*command) for command in commands(folder, options.side, options.overrides)]
    header = ["command", "own, GB", "resident, GB", "s"]
    print(markdown_table([header, *rows]))


def make_pictures(folder: Path, count: int, side: int) -> None:
    """Draw `count` pictures for training and a tenth as many for testing."""
    for split, number in (("train", count), ("test", count // 10)):
        for seed, (name, draw) in enumerate(CLASSES.items()):
            place = folder / split / name
            place.mkdir(parents=True, exist_ok=True)
            rng = np.random.default_rng([seed, number])
            for index in range(len(list(place.iterdir())), number // 2):
                (image,) = draw(1, (1, side, side), rng)
                Image.fromarray(image[0]).save(place / f"{index:05}.png", compress_level=1)


def commands(folder: Path, side: int, overrides: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield the commands, each as its name and its words."""
    run, pictures = folder / "run", folder / "pictures"
    agreed = f"data.shape=[1,{side},{side}]", "num_clients=3", "partition=iid", *overrides
    own = "data=imagefolder", f"data.path={pictures}", f"cache={folder / 'cache'}"
    settings = *own, *agreed
    site = site_keys(from_overrides(settings, folder))
    site |= {"client": 0, "state": str(folder / "state")}
    site["files"] = {
        "path": str(pictures / "train"),
        "image_column": "image",
        "label_column": "label",
        "patient_column": None,
        "skip_unreadable": False,
    }
    (folder / "site.yaml").write_text(yaml.safe_dump(site))
    yield "data", *settings
    yield "data (again)", *settings
    yield "site check", str(folder / "site.yaml"), *agreed
    yield "run", *settings, f"run_folder={run}"
    yield "report", str(run)
    yield "export", str(run), "--out", str(folder / "model")
    student = folder / "model" / "student.safetensors"
    yield "predict", str(student), str(pictures / "test" / "lines")


def measured(name: str, *words: str) -> list[str]:
    """Run a command; return its row."""
    command = ["fed-dpsd", *re.sub(r" \(.*", "", name).split(), *words]
    own = resident = 0.0
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        found = {key: int(value) / 1e6 for key, value in re.findall(r"(\w+):\s+(\d+) kB", status)}
        own = max(own, found.get("RssAnon", 0) + found.get("RssShmem", 0))
        resident = max(resident, found.get("VmHWM", 0))
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    seconds = time.monotonic() - start
    return [name, f"{own:.1f}", f"{resident:.1f}", f"{seconds:.0f}"]


if __name__ == "__main__":
    main()
