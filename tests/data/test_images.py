"""Images whose pixels Pillow would change without a word are refused; opaque ones are read."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from fed_dpsd.data.images import FITS, open_image, scale, to_pixels

GREY, COLOUR, GREY_ALPHA, COLOUR_ALPHA = 0, 2, 4, 6  # a PNG's colour types
CHANNELS = {GREY: 1, COLOUR: 3, GREY_ALPHA: 2, COLOUR_ALPHA: 4}
DEEP = "more than 8 bits per channel; save it with 8"
CLEAR = "parts of it are transparent; save it without transparency"
UNSIGNED = "its pixels are floats, signed or 32-bit"
OPAQUE = 65_535


def chunk(kind, content):
    end = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + end


def png(kind, *pixel, bits=16, clear=()):
    """A PNG of 8 x 8 equal pixels; grey or colour pixels equal to `clear` are transparent."""
    row = b"\0" + np.array(pixel * 8, f">u{bits // 8}").tobytes()
    assert len(pixel) == CHANNELS[kind]
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, bits, kind, 0, 0, 0))
    trns = chunk(b"tRNS", np.array(clear, ">u2").tobytes()) if clear else b""
    body = chunk(b"IDAT", zlib.compress(row * 8)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + trns + body


def tiff(*bits, photometric=1, kind=1, extra=()):
    """An uncompressed TIFF of 8 x 8 pixels of zeros."""
    tags = {256: [8], 257: [8], 258: bits, 259: [1], 262: [photometric], 277: [len(bits)]}
    tags |= {278: [8], 279: [8 * sum(bits)], 339: [kind] * len(bits)}
    tags |= {338: extra} if extra else {}
    late = 8 + 2 + 12 * (len(tags) + 1) + 4  # where values of more than four bytes are
    entries, values = b"", b""
    for tag, numbers in sorted({**tags, 273: None}.items()):
        numbers = [late + 64] if numbers is None else numbers
        content = struct.pack(f"<{len(numbers)}H", *numbers)
        if len(content) > 4:
            values, content = values + content, struct.pack("<I", late + len(values))
        entries += struct.pack("<HHI4s", tag, 3, len(numbers), content)
    count = struct.pack("<H", len(tags) + 1)
    head = b"II*\0" + struct.pack("<I", 8) + count + entries + bytes(4) + values
    return head.ljust(late + 64, b"\0") + bytes(8 * sum(bits))


def saved(form, mode="L", shade=9, frames=1, **options):
    buffer = io.BytesIO()
    images = [Image.new(mode, (8, 8), shade) for _ in range(frames)]
    for number, image in enumerate(images[1:], 1):
        image.putpixel((0, 0), 20 * number)
    more = {"save_all": True, "append_images": images[1:]} if frames > 1 else {}
    images[0].save(buffer, form, **more, **options)
    return buffer.getvalue()


def palette(alpha):
    buffer = io.BytesIO()
    Image.new("RGBA", (8, 8), (9, 9, 9, alpha)).convert("P").save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (png(COLOUR, 4_000, 4_000, 4_000), DEEP),
        (png(GREY_ALPHA, 4_000, OPAQUE), DEEP),
        (png(COLOUR_ALPHA, 4_000, 4_000, 4_000, OPAQUE), DEEP),
        (tiff(16, 16, 16, photometric=2), DEEP),
        (tiff(16, 16, 16, 16, photometric=5), DEEP),
        (tiff(8, kind=2), UNSIGNED),
        (tiff(16, kind=2), UNSIGNED),
        (tiff(32), UNSIGNED),
        (tiff(32, kind=3), UNSIGNED),
        (tiff(8, 8, extra=[0]), "it has 2 channels; save it as grey or RGB"),
        (tiff(8, 8, 8, 8, photometric=2, extra=[0]), "it has 4 channels; save it as grey or RGB"),
        (tiff(8, 8, 8, 8, 8, photometric=5, extra=[0]), "it has 5 channels"),
        (saved("PNG", "LA", (9, 254)), CLEAR),
        (saved("PNG", "RGBA", (9, 9, 9, 0)), CLEAR),
        (saved("WEBP", "RGBA", (9, 9, 9, 254), lossless=True), CLEAR),
        (saved("TIFF", "LA", (9, 1)), CLEAR),
        (png(GREY, 7, bits=8, clear=[7]), CLEAR),
        (png(COLOUR, 7, 8, 9, bits=8, clear=[7, 8, 9]), CLEAR),
        (png(GREY, 4_000, clear=[4_000]), CLEAR),
        (palette(alpha=254), CLEAR),
        (saved("PNG", frames=3), "it has 3 frames; save each as a separate file"),
        (saved("WEBP", "RGB", (9, 9, 9), frames=2, lossless=True), "it has 2 frames; save each"),
        (saved("TIFF", frames=4), "it has 4 pages; save each as a separate file"),
        (saved("GIF"), "it is not a PNG, JPEG, TIFF, BMP, WEBP or DICOM image"),
        (b"", "it is empty"),
    ],
    ids=lambda value: "image" if isinstance(value, bytes) else str(value),
)
def test_what_would_be_lost_is_refused(content, reason):
    for channels in (1, 3):
        with pytest.raises(ValueError, match=reason):
            open_image(content, channels)


@pytest.mark.parametrize(
    ("content", "shade"),
    [
        (png(GREY, 4_000), 250),
        (png(GREY, 4_000, clear=[5]), 250),
        (tiff(16), 0),
        (tiff(12), 0),
        (png(GREY_ALPHA, 9, 255, bits=8), 9),
        (png(COLOUR_ALPHA, 9, 9, 9, 255, bits=8), 9),
        (png(GREY, 9, bits=8, clear=[7]), 9),
        (saved("WEBP", "RGBA", (9, 9, 9, 255), lossless=True), 9),
        (saved("TIFF", "LA", (9, 255)), 9),
        (palette(alpha=255), 9),
        (saved("PNG", "1", 1), 255),
        (saved("BMP"), 9),
        (saved("MPO", frames=2), 9),  # its first picture is its main one
    ],
    ids=lambda value: "image" if isinstance(value, bytes) else str(value),
)
@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_what_is_opaque_is_read(content, shade):
    for channels in (1, 3):
        pixels = to_pixels(open_image(content, channels, 12))
        assert pixels.shape == (channels, 8, 8)
        assert np.unique(pixels).tolist() == [shade]


def test_a_picture_becomes_square_as_fit_says():
    wide = np.zeros((8, 16), np.uint8)
    wide[:, :4], wide[:, 4:12] = 200, 100
    scaled = {
        fit: scale(open_image(wide, 1), (1, 8, 8), fit)[0] for fit in ("crop", "pad", "stretch")
    }
    assert (scaled["crop"] == 100).all()  # without its left border
    assert (scaled["pad"][[0, 1, 6, 7]] == 0).all()
    assert (scaled["pad"][2:6, 0] == 200).all()
    assert (scaled["stretch"][:, 0] == 200).all()
    assert (scaled["stretch"][:, 7] == 0).all()
    square = wide[:, :8]
    assert all(np.array_equal(scale(open_image(square, 1), (1, 8, 8), f)[0], square) for f in FITS)
