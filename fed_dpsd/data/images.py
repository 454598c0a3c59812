"""Image files as arrays of pixels, read alike for data sets and for hospitals."""

import hashlib
import io
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

PHOTOMETRIC = 262  # the TIFF tag that is 0 if white is stored as 0
FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "WEBP")


def digests(images: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the (N,) identities of (N, C, H, W) images: a hash of each one's pixels alone.

    So copies of an image agree, whatever file, format or size they were stored in.
    """
    hashes = (
        hashlib.blake2b(np.ascontiguousarray(image), digest_size=8).digest() for image in images
    )
    return np.frombuffer(b"".join(hashes), "<i8").astype(np.int64)


def open_image(image: Path | bytes | NDArray[np.uint8], channels: int) -> Image.Image:
    """Return an image, grey or RGB, 8 bits a channel.

    Args:
        image: a file, its bytes, or (H, W) or (H, W, 3) pixels.
        channels: 1 for grey, 3 for RGB.

    Raises:
        OSError or ValueError: it is no image, or the range of its pixels is unknown.
    """
    if isinstance(image, np.ndarray):
        return _converted(Image.fromarray(image), channels)
    if isinstance(image, Path) and image.exists() and not image.is_file():
        raise ValueError("it is a folder")
    content = image.read_bytes() if isinstance(image, Path) else image
    try:
        with (
            warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning),
            Image.open(io.BytesIO(content), formats=FORMATS) as opened,
        ):
            inverted = getattr(opened, "tag_v2", {}).get(PHOTOMETRIC) == 0
            return _converted(ImageOps.exif_transpose(opened), channels, inverted)
    except UnidentifiedImageError:
        raise ValueError(f"it is none of {', '.join(FORMATS)}") from None
    except (OSError, ValueError, MemoryError):
        raise
    except Exception as error:  # Pillow's plugins raise any type of error on broken bytes
        raise ValueError(str(error) or type(error).__name__) from None


def _converted(image: Image.Image, channels: int, inverted: bool = False) -> Image.Image:
    """Return an image as grey or RGB; 16 bits become 8.

    Pillow itself turns an inverted image (white is 0) around if it has 8 bits, but not if it has
    16. So `inverted` matters only for the latter.
    """
    if image.mode in ("I", "F"):  # conversion to "L" would cut them off at 255
        raise ValueError(
            "its pixels are floats, signed or of 32 bits; convert it to 8 or 16 bits without a sign"
        )
    if image.mode.startswith("I;16"):  # radiographs often have 16 bits
        values = np.asarray(image).astype(np.uint16)
        image = Image.fromarray(((~values if inverted else values) >> 8).astype(np.uint8))
    return image.convert("L" if channels == 1 else "RGB")


def scaled(image: Image.Image, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return (C, size, size) pixels of `shape`: the middle square, scaled with antialiasing."""
    size = shape[2], shape[1]
    if image.size != size:
        image = ImageOps.fit(image, size, Image.Resampling.BILINEAR)
    return to_pixels(image)


def to_pixels(image: Image.Image) -> NDArray[np.uint8]:
    """Return the (C, H, W) pixels of a grey or RGB image."""
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
