"""Image files as arrays of pixels, for both data sets and hospitals."""

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from fed_dpsd.config import Fit, Window
from fed_dpsd.data.dicom import is_dicom, pixels_of

# TIFF tags
BITS, PHOTOMETRIC, SAMPLES, SAMPLE_FORMAT = 258, 262, 277, 339
WHITE_IS_ZERO, SIGNED = 0, 2
FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "WEBP")
FITS = {"crop": ImageOps.fit, "pad": ImageOps.pad}
UNSIGNED = "its pixels are floats, signed or 32-bit; convert it to unsigned 8 or 16 bits"


class Conversion(NamedTuple):
    """How images become arrays of one shape, each image by itself.

    Args:
        shape: (C, S, S); C is 1 for grey, 3 for RGB.
        fit: how images of other sizes become square: "crop" cuts the central square, "pad" adds
            black borders, "stretch" scales each side; None does not scale.
        bits: number of bits that 16-bit images other than DICOM use, 8 to 16.
        window: the window of grey DICOM images; see `dicom.pixels_of`.
    """

    shape: tuple[int, ...]
    fit: Fit | None = "crop"
    bits: int = 16
    window: Window = None


def open_image(
    image: Path | bytes | NDArray[np.uint8], channels: int, bits: int = 16, window: Window = None
) -> Image.Image:
    """Return an image, grey or RGB, 8 bits per channel.

    Args:
        image: a file, its bytes, or (H, W) or (H, W, 3) pixels.
        channels: 1 for grey, 3 for RGB.
        bits: as for `Conversion`. The result's `info["bits"]` is the number of bits of the largest
            value of a 16-bit image.
        window: as for `Conversion`. For DICOM, `info["lacks_window"]` says whether the header lacks
            it, and `info["levels"]` how many grey levels the darkest and lightest pixel span.

    Raises:
        UserError: the image is DICOM, and a package that reads it is not installed.
        OSError: the file cannot be read.
        ValueError: the file is not an image, has several pages or frames, is transparent, or has
            pixels that would lose bits or channels.
    """
    if isinstance(image, np.ndarray):
        return _convert(Image.fromarray(image), channels, bits)
    if isinstance(image, Path) and image.exists() and not image.is_file():
        raise ValueError("it is a folder")
    content = image.read_bytes() if isinstance(image, Path) else image
    if not content:
        raise ValueError("it is empty")
    if is_dicom(content, image.name if isinstance(image, Path) else ""):
        pixels, lacks_window = pixels_of(content, window)
        converted = _convert(Image.fromarray(pixels), channels, bits)
        converted.info |= {"lacks_window": lacks_window, "levels": int(np.ptp(pixels)) + 1}
        return converted
    try:
        with (
            warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning),
            Image.open(io.BytesIO(content), formats=FORMATS) as opened,
        ):
            tags = getattr(opened, "tag_v2", {})
            _require_all_read(opened, content[24] if opened.format == "PNG" else 8, tags)
            inverted = tags.get(PHOTOMETRIC) == WHITE_IS_ZERO
            ImageOps.exif_transpose(opened, in_place=True)
            return _convert(opened, channels, bits, inverted)
    except UnidentifiedImageError:
        raise ValueError(f"it is not a {', '.join(FORMATS)} or DICOM image") from None
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # Pillow's plugins raise any type of error on broken bytes
        raise ValueError(str(error) or type(error).__name__) from None


def _require_all_read(image: Image.Image, bits: int, tags: Mapping[int, Any]) -> None:
    """Raise ValueError if Pillow would silently drop frames, channels, bits or signs of an image.

    `bits` is the depth of formats without TIFF tags.
    """
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # a photograph with previews or other views
        unit = "pages" if image.format == "TIFF" else "frames"
        raise ValueError(f"it has {frames} {unit}; save each as a separate file")
    if SIGNED in tags.get(SAMPLE_FORMAT, ()):
        raise ValueError(UNSIGNED)
    if max(tags.get(BITS, (bits,))) > 8 and image.mode[0] not in "IF":
        raise ValueError(
            "its colour or transparent pixels have more than 8 bits per channel; save it with 8 "
            "bits per channel, or as grey with 16 bits"
        )
    if (samples := tags.get(SAMPLES, 1)) > max(len(image.getbands()), 1):
        raise ValueError(f"it has {samples} channels; save it as grey or RGB")


def _convert(image: Image.Image, channels: int, bits: int, inverted: bool = False) -> Image.Image:
    """Return an image as grey or RGB, with the upper 8 of the used bits.

    `inverted` (white is 0) matters for 16 bits only: Pillow inverts 8-bit images itself.
    """
    if image.mode in ("I", "F"):  # conversion to "L" would cut them off at 255
        raise ValueError(UNSIGNED)
    if _is_transparent(image):
        raise ValueError("parts of it are transparent; save it without transparency")
    if image.mode.startswith("I;16"):  # radiographs often have 16 bits
        values = np.asarray(image).astype(np.uint16)
        used = int(values.max()).bit_length()
        if used > bits:
            raise ValueError(f"its pixels have {used} bits, more than pixel_bits={bits}")
        values = np.uint16(2**bits - 1) - values if inverted else values
        image = Image.fromarray((values >> (bits - 8)).astype(np.uint8))
        image.info["bits"] = used
    mode = "L" if channels == 1 else "RGB"
    converted = image if image.mode == mode else image.convert(mode)
    converted.info["bits"] = image.info.get("bits", 0)
    return converted


def _is_transparent(image: Image.Image) -> bool:
    """Return whether an image has a pixel that is not opaque."""
    if not image.has_transparency_data:
        return False
    if image.mode.startswith("I;16"):  # conversion would ignore the transparent shade
        return bool((np.asarray(image) == image.info["transparency"]).any())
    return bool(np.asarray(image.convert("RGBA").getchannel("A")).min() < 255)


def scale(image: Image.Image, shape: tuple[int, ...], fit: Fit) -> NDArray[np.uint8]:
    """Return (C, size, size) pixels of `shape`, scaled with antialiasing; see `Conversion`."""
    size = shape[2], shape[1]
    how = Image.Resampling.BILINEAR
    if image.size != size:
        image = image.resize(size, how) if fit == "stretch" else FITS[fit](image, size, how)
    return to_pixels(image)


def to_pixels(image: Image.Image) -> NDArray[np.uint8]:
    """Return the (C, H, W) pixels of a grey or RGB image."""
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
