"""The commands `fed-dpsd export` and `fed-dpsd predict`: an exported student, and its use."""

import csv
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from fed_dpsd.cli.console import console
from fed_dpsd.errors import UserError


def export(
    run_folder: Annotated[
        Path,
        typer.Argument(help="Folder of a completed run, which it printed last.", metavar="RUN"),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("model"),
    form: Annotated[
        Literal["safetensors", "onnx"],
        typer.Option(
            "--format", help="safetensors: for `fed-dpsd predict`; onnx: for other tools."
        ),
    ] = "safetensors",
) -> None:
    """Write a run's student, with its privacy card inside, and print the file's path."""
    from fed_dpsd.server.export import export as write_student

    print(write_student(run_folder.absolute(), out.absolute(), form))


def predict(
    model: Annotated[
        Path,
        typer.Argument(help="File that `fed-dpsd export` wrote, .safetensors.", metavar="MODEL"),
    ],
    images: Annotated[list[Path], typer.Argument(help="Image files.", metavar="IMAGE...")],
) -> None:
    """Classify images: print a line of CSV for each, with its class and every probability.

    Images are converted and scaled as hospitals' records are. Nothing is sent anywhere.
    """
    import numpy as np

    from fed_dpsd.api import load_student
    from fed_dpsd.data.images import open_image, scaled

    student = load_student(model)
    console.print(student.facts.get("result"), markup=False, soft_wrap=True)
    shape, pixels = student.network.shape, []
    for path in images:
        try:
            pixels.append(scaled(open_image(path, shape[0])[1], shape))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"{path} is no image that can be read ({reason}); leave it out, or convert it"
            ) from None
    scores = student.predict(np.stack(pixels))
    writer = csv.writer(sys.stdout)
    writer.writerow(["image", "class", *range(student.network.num_classes)])
    for path, row in zip(images, scores, strict=True):
        writer.writerow([path, int(row.argmax()), *(f"{score:.4f}" for score in row)])
