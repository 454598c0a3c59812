"""The commands `export`, `predict` and `synthesize`, which use the results of a run."""

import csv
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer
from rich.table import Table

from fed_dpsd.cli.console import console, importing, say, say_failed
from fed_dpsd.errors import UserError, printable, reason_of
from fed_dpsd.progress import PlainConsole

if TYPE_CHECKING:
    from fed_dpsd.server.student import Student

AT_ONCE = 256  # images that are classified together
SHOWN = 20  # rows of a table on a terminal


Run = Annotated[
    Path, typer.Argument(help="Folder of a completed run (its last line of output).", metavar="RUN")
]


def export(
    run_folder: Run,
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("model"),
    form: Annotated[
        Literal["safetensors", "onnx", "pt2"],
        typer.Option(
            "--format",
            help="safetensors or onnx, which `fed-dpsd predict` reads; pt2 for torch.export.load.",
        ),
    ] = "safetensors",
) -> None:
    """Write a run's student with its privacy card, and print the file's path.

    PRIVACY.md, privacy_card.json, README.md (a model card for the Hugging Face hub) and config.json
    are written next to it. An ONNX or pt2 file is first compared with the student on the run's test
    images.

    Example: fed-dpsd export runs/RUN --out model

    Or: fed-dpsd export runs/RUN --out model --format onnx

    Read on: docs/artefacts.md
    """
    from fed_dpsd.server.export import export as write_student

    exported = write_student(run_folder.absolute(), out.absolute(), form)
    if exported.compared:
        say(exported.compared)
    print(exported.path)


def synthesize(
    run_folder: Run,
    number: Annotated[int, typer.Option("--num", min=1, help="How many images to draw.")],
    out: Annotated[Path, typer.Option(help="FILE.parquet to write, in a separate folder.")],
    labels: Annotated[
        bool, typer.Option("--labels", help="Add the student's labels in two more columns.")
    ] = False,
    source: Annotated[
        Literal["generator", "queries"] | None,
        typer.Option(
            "--from",
            help="generator: the run's own, by default if there is one; queries: images like the "
            "ones that the run sent.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same file.")] = 0,
) -> None:
    """Write synthetic images of a run as parquet with a privacy card, and print the path.

    Read the file with `datasets.load_dataset("parquet", data_files=FILE)` or data.path. PRIVACY.md,
    privacy_card.json and README.md (a dataset card for the Hugging Face hub) are written next to
    it.

    Example: fed-dpsd synthesize runs/RUN --num 1000 --labels --out synthetic/train.parquet

    Read on: docs/artefacts.md
    """
    from fed_dpsd.server.synthesis import synthesize as write_images

    written = write_images(run_folder.absolute(), number, out.absolute(), labels, source, seed)
    say(written.origin)
    print(written.path)


def predict(
    model: Annotated[
        Path,
        typer.Argument(
            help="File written by `fed-dpsd export`, .safetensors or .onnx.", metavar="MODEL"
        ),
    ],
    paths: Annotated[
        list[Path], typer.Argument(help="Image files, or folders of images.", metavar="IMAGE...")
    ],
    every_class: Annotated[
        bool, typer.Option("--all", help="Print the probability of every class, one column each.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="FILE.csv to write instead of stdout.")] = None,
    about: Annotated[
        bool,
        typer.Option("--about", help="First print the accuracy and privacy of the model's run."),
    ] = False,
) -> None:
    """Print a CSV line for each image: the file, its class and the class's probability.

    On a terminal, without --all, it prints a table of the first images instead. Images are
    converted to grey or RGB and scaled like a hospital's records. Nothing is sent anywhere.
    Unreadable files are reported on stderr, and the exit code is then 1.

    Example: fed-dpsd predict model/student.safetensors IMAGE.png

    Read on: docs/artefacts.md
    """
    with importing():
        from fed_dpsd.progress import show_progress
        from fed_dpsd.server.student import open_student
        from fed_dpsd.storage import ANY_TEXT, replacing

    if out is not None and out.exists():
        raise UserError(f"--out {out} already exists; choose another file")
    student = open_student(model)
    if about:
        from fed_dpsd.server.cards import as_markdown  # a second more

        say(student.facts["result"])
        say(as_markdown(student.card))
    files, bad = _files(paths), list[Path]()
    header = ["file", "class", "probability", *(student.classes if every_class else ())]
    rows = _predict_rows(student, files, every_class, bad)
    if out is None and sys.stdout.isatty():
        with show_progress(console):
            listed = list(rows)
        (_write_csv if every_class else _print_table)(sys.stdout, header, listed)
    elif out is None:
        with show_progress(console):
            _write_csv(sys.stdout, header, rows)
    else:
        with (
            show_progress(console),
            replacing(out) as part,
            part.open("w", encoding="utf-8", errors=ANY_TEXT) as file,
        ):
            _write_csv(file, header, rows)
        print(out.absolute())
    if bad:
        raise typer.Exit(1)


def _predict_rows(
    student: "Student[Any]", files: Sequence[Path], every_class: bool, bad: list[Path]
) -> Iterator[list[str]]:
    """Yield the cells of each readable image; report unreadable images and add them to `bad`."""
    import numpy as np

    from fed_dpsd.data.images import open_image, scale
    from fed_dpsd.progress import reporting

    shape, fit, bits, window = student.conversion
    with reporting("images", len(files)) as task:
        for start in range(0, len(files), AT_ONCE):
            images = {}
            for path in files[start : start + AT_ONCE]:
                try:
                    opened = open_image(path, shape[0], bits, window)
                    images[path] = scale(opened, shape, fit or "crop")
                except (OSError, ValueError) as error:
                    bad.append(path)
                    say_failed(f"{path} is skipped: {reason_of(error)}")
            scores = student.predict(np.stack([*images.values()])) if images else ()
            for path, row in zip(images, scores, strict=True):
                best = int(row.argmax())
                cells = row[best], *(row if every_class else ())
                yield [str(path), student.classes[best], *(f"{score:.4f}" for score in cells)]
            task.advance(len(files[start : start + AT_ONCE]))


def _write_csv(file: TextIO, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)


def _print_table(file: TextIO, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in header:
        table.add_column(name, justify="right" if name == "probability" else "left")
    for row in rows[:SHOWN]:
        table.add_row(*map(printable, row))
    out = PlainConsole(file=file)
    if not rows:
        out.print("no image can be read")
        return
    out.print(table)
    if len(rows) > SHOWN:
        out.print(f"and {len(rows) - SHOWN:,} more; --out FILE.csv writes all", soft_wrap=True)
    counts = Counter(row[1] for row in rows).most_common(SHOWN)
    text = ", ".join(f"{name} ({number:,})" for name, number in counts)
    out.print(f"{len(rows):,} images: {text}", soft_wrap=True)


def _files(paths: Sequence[Path]) -> list[Path]:
    """Return the files, replacing each folder by all files below it except hidden ones."""
    from fed_dpsd.data.reader import walk_classes

    files: list[Path] = []
    for path in paths:
        try:
            inside = sorted(file for file, _ in walk_classes(path)) if path.is_dir() else [path]
        except OSError as error:
            raise UserError(
                f"{error.filename} cannot be read ({error.strerror}); check its permissions"
            ) from None
        if not inside:
            raise UserError(f"{path} contains no file; give images, or folders of images")
        files += inside
    return files
