"""Time whole runs in turn, each in its own process, without trained teachers in the cache.

    python benchmarks/bench.py local flower --out bench.json -- data=mnist data.path=mnist

A row is an engine of `fed-dpsd run` (`local`, `flower`), `fed-dpsd rehearse`, or FedAVG in another
simulator: `fedavg` is Flower's own strategy; `pfl` and `fluke` need `--peers FOLDER`, with
environments FOLDER/pfl (pfl[pytorch]==0.6.0) and FOLDER/fluke (fluke-fl==0.8.1) that have the same
torch. All else after `--` is an override of the command. `--show FILE` prints a result as a table.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from fed_dpsd.experiment import Experiment, load_data, one_run, partitions
from fed_dpsd.methods.fedavg import FedAVG
from fed_dpsd.report.tables import markdown_table
from fed_dpsd.server.run_folder import versions

OWN = ("local", "flower", "rehearse")
PEERS = {"fedavg": "flower_fedavg.py", "pfl": "pfl_research.py", "fluke": "fluke_fl.py"}
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
COLUMNS = {  # column of the table: key of a repetition, factor
    "processor s": ("processor_seconds", 1.0),
    "s": ("seconds", 1.0),
    "s of rounds": ("rounds_seconds", 1.0),
    "peak MB": ("peak_memory", 1e-6),
    "accuracy, %": ("accuracy", 100.0),
}


def main() -> None:
    """Run the rows and write the result, or show one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join((*OWN, *PEERS))}")
    parser.add_argument("--clients", default="", help="numbers of clients, such as 10,1000")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peers", type=Path, help="the folder of the simulators' environments")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    parser.add_argument("--show", type=Path, help="print the table of this file, and run nothing")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options, overrides = parser.parse_args(words[:end]), words[end + 1 :]
    if not options.show:
        if unknown := [row for row in options.rows if row not in (*OWN, *PEERS)]:
            parser.error(f"{unknown[0]!r} is not one of {', '.join((*OWN, *PEERS))}")
        bench(options, overrides)
    print(markdown_table(table(json.loads((options.show or options.out).read_text()))))


def bench(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Run every row for each number of clients, `repeat` times; write the JSON after each."""
    grids = [[f"num_clients={n}"] for n in options.clients.split(",") if n] or [[]]
    content: dict[str, Any] = {
        "command": " ".join(["benchmarks/bench.py", *map(without_folder, sys.argv[1:])]),
        "versions": versions(),  # with the commit
        "load_average": os.getloadavg(),
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as temporary:
        for place, clients in enumerate(grids):
            prepared = Path(temporary) / str(place)
            experiment = prepare([*overrides, *clients], prepared, set(options.rows) & set(PEERS))
            for row in options.rows:
                number = experiment.config.num_clients
                found = {"row": row, "clients": number, "repetitions": []}
                content["rows"].append(found | {"prepared": str(prepared), "words": clients})
        for repetition in range(options.repeat):
            for row in content["rows"]:
                print(f"repetition {repetition + 1}: {row['row']}, {row['clients']} clients")
                words = [*overrides, *row["words"]]
                row["repetitions"].append(run(row["row"], words, Path(row["prepared"]), options))
                kept = [
                    {k: r[k] for k in ("row", "clients", "repetitions")} for r in content["rows"]
                ]
                options.out.write_text(json.dumps(content | {"rows": kept}, indent=1) + "\n")


def without_folder(word: str) -> str:
    """Return a word of a command, with an absolute path reduced to its last part."""
    key, equals, value = word.rpartition("=")
    return f"{key}{equals}{Path(value).name}" if value.startswith("/") else word


def prepare(overrides: Sequence[str], folder: Path, peers: set[str]) -> Experiment:
    """Decode the data into a cache; for other simulators, also write it with FedAVG's settings.

    Raises:
        UserError: the configuration has a problem.
        SystemExit: the run is not what the other simulators do.
    """
    cache = folder / "cache"
    experiment = one_run([*overrides, f"cache={cache}"], Path.cwd())
    config, teacher = experiment.config, experiment.config.teacher
    parts = partitions(experiment)  # fails before any row runs
    if not peers:
        return experiment
    method = experiment.method
    if not (
        isinstance(method, FedAVG)
        and teacher.epochs == method.local_epochs
        and (experiment.training.name, config.architecture(0)) == ("plain", "cnn")
        and (teacher.momentum, teacher.min_steps, config.clients_per_round) == (0, 1, None)
        and not any(len(part) % teacher.batch_size for part in parts)
    ):
        sys.exit(
            f"{', '.join(peers)}: needs method=fedavg training=plain model=cnn teacher.momentum=0 "
            "teacher.min_steps=1 clients_per_round=null, teacher.epochs as method.local_epochs, "
            "and clients whose records fill whole batches"
        )
    data = load_data(config.data, config.cache)
    train, (channels, side, _) = data.train.take(np.concatenate(parts)), config.data.shape
    np.savez(
        folder / "data.npz",
        images=train.images,
        labels=train.labels,
        sizes=[len(part) for part in parts],
        test_images=data.test.images,
        test_labels=data.test.labels,
    )
    network = {"channels": channels, "side": side, "classes": config.data.num_classes}
    network |= {"width": config.model.teacher_width}
    settings = {key: getattr(teacher, key) for key in ("epochs", "batch_size", "learning_rate")}
    settings |= {"rounds": config.rounds, "seed": config.seed, "network": network}
    (folder / "settings.json").write_text(json.dumps(settings))
    return experiment


def run(
    row: str, overrides: Sequence[str], prepared: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Run a row once, and return its cost and its accuracy."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if row in PEERS:
            for file in prepared.glob("*.*"):
                (folder / file.name).symlink_to(file)
            python = sys.executable if row == "fedavg" else options.peers / row / "bin" / "python"
            cost = watch(
                [str(python), str(Path(__file__).parent / "peers" / PEERS[row]), temporary]
            )
            result = json.loads((folder / "result.json").read_text())
            return cost | {key: result[key] for key in ("rounds_seconds", "accuracy")}
        if row == "rehearse":
            command = ["rehearse", "--out", f"{folder}/runs", *overrides]
        else:
            shutil.copytree(prepared / "cache", folder / "cache")
            places = [f"out={folder}/runs", f"cache={folder}/cache"]
            command = ["run", "--engine", row, *overrides, *places]
        cost = watch(["fed-dpsd", *command])
        (summary,) = (folder / "runs").glob("*/summary.json")
        found = json.loads(summary.read_text())
        own = {"rounds_seconds": found["seconds"]["rounds"], "queries": found["queries"]}
        own |= {"accuracy": found["accuracy"]["student"]}
        return cost | own | {"student_sha256": found["student_sha256"]}


def watch(command: Sequence[str]) -> dict[str, Any]:
    """Run a command; return its seconds, and the processor time and peak memory of its processes.

    Processes are sampled, since those of Ray are nobody's children at the end; pages that several
    processes share count once.

    Raises:
        SystemExit: the command failed.
    """
    seconds: dict[psutil.Process, float] = {}
    peak, before, began = 0, resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | QUIET)
        root = psutil.Process(process.pid)
        while process.poll() is None:
            with suppress(psutil.Error):
                seconds = dict.fromkeys((root, *root.children(recursive=True)), 0.0) | seconds
            held = 0
            for each in seconds:
                with suppress(psutil.Error):
                    seconds[each] = sum(each.cpu_times()[:2])
                    held += each.memory_full_info().pss
            peak = max(peak, held)
            time.sleep(0.5)
        ended, after = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
        if process.returncode:
            log.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{log.read()[-2000:]}")
    waited = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    used = max(sum(seconds.values()), waited)
    return {"seconds": ended - began, "processor_seconds": used, "peak_memory": peak}


def table(content: Mapping[str, Any]) -> list[list[str]]:
    """Return a header and a line for each row: medians, with the least and the most."""
    lines = [["row", "clients", *COLUMNS]]
    for row in content["rows"]:
        line = [row["row"], f"{row['clients']:,}"]
        for key, factor in COLUMNS.values():
            values = sorted(each[key] * factor for each in row["repetitions"])
            spread = f" ({values[0]:.4g} to {values[-1]:.4g})" if len(values) > 1 else ""
            line.append(f"{statistics.median(values):.4g}{spread}")
        lines.append(line)
    return lines


if __name__ == "__main__":
    main()
