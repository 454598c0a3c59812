"""Measure the processor time of short commands, against `import torch`, in turn.

    python benchmarks/commands.py --out bench_commands.json

It first runs the default and a run on 64 pixels, each of two rounds, and exports both students.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from bench import watch
from memory import make_pictures
from PIL import Image

from fed_dpsd.report.tables import markdown_table
from fed_dpsd.server.run_folder import versions

SIDES = (8, 64)
PICTURES = 120  # for training, of 64 pixels


def main() -> None:
    """Prepare, time every command `repeat` times, write the JSON and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("bench_commands.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["FED_DPSD_HOME"] = f"{temporary}/home"
        folder = Path(temporary)
        commands = prepare(folder)
        times: dict[str, list[float]] = {name: [] for name in commands}
        for repetition in range(options.repeat):
            for name, words in commands.items():
                written = [word.replace("NEW", str(repetition)) for word in words]
                times[name].append(watch(written)["processor_seconds"])
    content: dict[str, Any] = {"command": " ".join(["benchmarks/commands.py", *sys.argv[1:]])}
    content |= {"versions": versions(), "load_average": os.getloadavg(), "seconds": times}
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    base = statistics.median(times["import torch"])
    lines = [["command", "processor s", "over import torch"]]
    for name, values in times.items():
        median = statistics.median(values)
        spread = f"{median:.2f} ({min(values):.2f} to {max(values):.2f})"
        lines.append([name, spread, f"{median / base:.2f}"])
    print(markdown_table(lines))


def prepare(folder: Path) -> dict[str, list[str]]:
    """Run and export; return the commands to time by name. NEW stands for a new number."""
    rng = np.random.default_rng(0)
    make_pictures(folder / "pictures", PICTURES, SIDES[1])
    own = ["data=imagefolder", f"data.path={folder}/pictures", "data.shape=[1,64,64]"]
    commands = {
        "import torch": [sys.executable, "-c", "import torch"],
        "privacy plan": ["fed-dpsd", "privacy", "plan"],
    }
    for side, overrides in zip(SIDES, ([], [*own, "num_clients=2"]), strict=True):
        runs = folder / f"runs{side}"
        watch(["fed-dpsd", "run", "rounds=2", f"out={runs}", *overrides])
        (run,) = (str(each) for each in runs.iterdir() if (each / "summary.json").exists())
        model, picture = f"{folder}/model{side}", f"{folder}/picture{side}.png"
        watch(["fed-dpsd", "export", run, "--out", model])
        Image.fromarray(rng.integers(0, 256, (side, side), np.uint8)).save(picture)
        if side == SIDES[0]:
            commands["report"] = ["fed-dpsd", "report", run, "--out", f"{folder}/report-NEW"]
            commands["export"] = ["fed-dpsd", "export", run, "--out", f"{folder}/export-NEW"]
        predict = ["fed-dpsd", "predict", f"{model}/student.safetensors", picture]
        commands[f"predict of one picture of {side} pixels"] = predict
    return commands


if __name__ == "__main__":
    main()
