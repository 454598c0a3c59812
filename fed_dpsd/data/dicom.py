"""DICOM files as pixels of 8 bits. Of a data set, only what pixels need and PatientID are read.

pydicom's messages may quote headers, so none is shown, logged or kept in an error.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fed_dpsd.config import Window
from fed_dpsd.errors import UserError

PATIENT_ID = "PatientID"
# Where enhanced files have their rescale and window.
ENHANCED = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
PIXEL_TAGS = (
    *("Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "NumberOfFrames"),
    *("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence", "VOILUTSequence"),
    *("VOILUTFunction", "WindowCenter", "WindowWidth", *ENHANCED, "PixelData"),
)
LARGEST_DEPTH = 16  # bits of a grey level
LARGEST = 2**28  # values of a picture; a broken header may state more than fits into memory
GREY = ("MONOCHROME1", "MONOCHROME2")
COLOURS = ("RGB", "YBR_FULL", "YBR_FULL_422")  # as which pydicom returns RGB
COMPRESSED = ("YBR_ICT", "YBR_RCT")  # only JPEG 2000 has them
DECODERS = ("pylibjpeg", "pylibjpeg-libjpeg", "pylibjpeg-openjpeg", "pyjpegls", "python-gdcm")


class _Unreadable(ValueError):
    """A picture cannot be read, for a reason in our own words."""


def is_dicom(content: bytes, name: str = "") -> bool:
    """Return whether a file is DICOM, by its content or its name."""
    return content[128:132] == b"DICM" or name.lower().endswith(".dcm")


def pixels_of(content: bytes, window: Window) -> tuple[NDArray[np.uint8], bool]:
    """Return the (H, W) or (H, W, 3) pixels of a DICOM file; black is 0, also for MONOCHROME1.

    The grey levels keep all bits through the modality's transform and the window, and are then
    divided into 256 equal steps. These cover the window or, without one, all values that the
    header's number of bits can store; the picture's own values do not matter.

    Args:
        content: the file.
        window: None for no window; "header" for the header's VOI LUT or first window, and none if
            it has neither; or the centre and width of a linear window, after the modality's
            transform. Colour has no window.

    Returns:
        The pixels, and whether the header lacks the window that `window` asks for.

    Raises:
        UserError: pydicom, or a decoder of compressed pixels, is not installed.
        ValueError: the file is broken, has several frames or no pixels, or pixels of a kind that
            would lose bits.
    """
    with _reading():
        header = _header(content, PIXEL_TAGS)
        _require_readable(header)
        pixels = _decoded(header)
        if pixels.ndim != (2 if header.SamplesPerPixel == 1 else 3):
            raise _Unreadable("it has several frames; save each as a separate file")
        if pixels.ndim == 2:
            return _grey(pixels, header, window)
        if pixels.dtype != np.uint8 or pixels.shape[2:] != (3,):
            raise _Unreadable("its colours are not RGB with 8 bits per channel; save it as that")
        return pixels, False


def patient_of(file: Path) -> str | None:
    """Return the text of a file's PatientID, "" if it is missing; None if the file is not DICOM.

    Raises:
        OSError: the file cannot be read.
        UserError: pydicom is not installed.
        ValueError: the header is broken.
    """
    content = file.read_bytes()
    if not is_dicom(content, file.name):
        return None
    with _reading():
        return str(_header(content, [PATIENT_ID]).get(PATIENT_ID) or "")


def decoder_versions() -> str:
    """Return the versions of pydicom and of installed decoders."""
    found = []
    for package in ("pydicom", *DECODERS):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Silence pydicom, and replace its errors, whose texts may quote headers."""
    logger = logging.getLogger("pydicom")
    propagated, logger.propagate = logger.propagate, False
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except (UserError, MemoryError, _Unreadable):
        raise
    except Exception as error:  # pydicom raises any type of error on broken bytes
        raise ValueError(
            f"its DICOM header or pixels cannot be read ({type(error).__name__})"
        ) from None
    finally:
        logger.propagate = propagated


def _header(content: bytes, tags: Sequence[str]) -> Any:
    """Return a pydicom Dataset of these tags alone."""
    try:
        import pydicom
    except ImportError:
        raise UserError("DICOM needs pydicom; run pip install 'fed-dpsd[dicom]'") from None
    header = pydicom.dcmread(io.BytesIO(content), force=True, specific_tags=[*tags])
    if "TransferSyntaxUID" not in header.file_meta:  # a file without a preamble
        header.file_meta.TransferSyntaxUID = pydicom.uid.ImplicitVRLittleEndian
    return header


def _require_readable(header: Any) -> None:
    """Raise an error if pixels cannot be decoded without loss."""
    if "PixelData" not in header:
        raise _Unreadable("it is not DICOM, or DICOM without pixels")
    if (frames := int(header.get("NumberOfFrames") or 1)) > 1:
        raise _Unreadable(f"it has {frames} frames; save each as a separate file")
    if any(each in header for each in ENHANCED):
        raise _Unreadable("it is an enhanced file; save it as a classic one")
    kind = header.PhotometricInterpretation
    if kind == "PALETTE COLOR":
        raise _Unreadable("its colours are in a palette; save it as RGB")
    colours = kind in COLOURS or (
        kind in COMPRESSED and header.file_meta.TransferSyntaxUID.is_compressed
    )
    if not (colours if header.SamplesPerPixel > 1 else kind in GREY):
        raise _Unreadable("its pixels are neither grey nor RGB; save it as one of these")
    if header.BitsStored > LARGEST_DEPTH:
        raise _Unreadable(f"it stores more than {LARGEST_DEPTH} bits per pixel")
    if header.get("HighBit", header.BitsStored - 1) != header.BitsStored - 1:
        raise _Unreadable("its bits do not begin with the lowest; save it again")
    if header.Rows * header.Columns * header.SamplesPerPixel > LARGEST:
        raise _Unreadable(f"it states more than {LARGEST:,} values")
    if ("RescaleSlope" in header) != ("RescaleIntercept" in header):
        raise _Unreadable("it has a rescale's slope or intercept alone; save it with both or none")


def _decoded(header: Any) -> NDArray[Any]:
    """Return the pixels as stored, or as RGB in place of YBR."""
    from pydicom.pixels import get_decoder, pixel_array

    syntax = header.file_meta.TransferSyntaxUID
    try:
        decoder = get_decoder(syntax)
    except NotImplementedError:
        raise _Unreadable("its transfer syntax is unknown to pydicom") from None
    needs = (each.partition(" - requires ")[2] for each in decoder.missing_dependencies)
    packages = ", or ".join(needs).replace("gdcm>", "python-gdcm>")
    if not decoder.is_available:
        raise UserError(
            f"DICOM pixels are compressed ({syntax.name}) and need a decoder; install {packages}"
        )
    try:
        return pixel_array(header)
    except RuntimeError:  # all decoders failed
        remedy = f"; if it is intact, install {packages}" if packages else ""
        raise _Unreadable(f"its pixels ({syntax.name}) cannot be decoded{remedy}") from None


def _grey(
    pixels: NDArray[np.integer[Any]], header: Any, window: Window
) -> tuple[NDArray[np.uint8], bool]:
    """Return pixels as 8 bits, and whether the header lacks its window; see `pixels_of`."""
    from pydicom.pixels import apply_modality_lut, apply_voi, apply_windowing

    number = 2**header.BitsStored
    first = -number // 2 if header.PixelRepresentation else 0
    stored = np.arange(first, first + number)
    levels = apply_modality_lut(stored, header)  # of each value, in order
    low, high = levels[0], levels[-1]
    if luts := header.get("ModalityLUTSequence"):
        low, high = 0, 2 ** luts[0].LUTDescriptor[2] - 1
    elif not low < high:
        raise _Unreadable("its rescale slope is not positive")
    lacks = False
    if window == "header" and (luts := header.get("VOILUTSequence")):
        entries, start, bits = luts[0].LUTDescriptor
        levels = np.clip(np.rint(levels), start, start + (entries or 2**16) - 1).astype(np.int64)
        luts[0].LUTDescriptor = [entries, start, 16]  # with 8, pydicom's places would overflow
        levels, low, high = apply_voi(levels, header), 0, 2**bits - 1
    elif window == "header":
        lacks = header.get("WindowCenter") is None or header.get("WindowWidth") is None
        levels = levels if lacks else apply_windowing(levels, header)  # to the same range
    elif window is not None:
        header.WindowCenter, header.WindowWidth = window
        header.VOILUTFunction = "LINEAR"
        levels = apply_windowing(levels, header)
    # For levels of a linear transform, these are the upper 8 of the stored bits.
    parts = (levels.astype(np.float64) - low) / (high - low)
    steps = np.clip(parts * 256, 0, 255).astype(np.uint8)
    if header.PhotometricInterpretation == "MONOCHROME1":
        steps = 255 - steps
    places = np.clip(pixels, first, first + number - 1).astype(np.int32) - first
    return steps[places], lacks
