"""Drawn shapes of three classes, in pictures of various sizes, modes and formats."""

import numpy as np
from PIL import Image, ImageDraw

CLASSES = "circle", "square", "triangle"
MODES = "RGB", "L", "RGBA", "P"


def picture(name, rng):
    """A shape of one class, near the middle of a picture with its own size and colours."""
    width, height = (int(side) for side in rng.integers(40, 120, 2))
    dark, light = (tuple(int(c) for c in rng.integers(*span, 3)) for span in ((0, 60), (180, 256)))
    image = Image.new("RGB", (width, height), light)
    radius = min(width, height) * rng.uniform(0.3, 0.4)
    x, y = width / 2 + rng.uniform(-3, 3), height / 2 + rng.uniform(-3, 3)
    draw = ImageDraw.Draw(image)
    if name == "circle":
        draw.ellipse([x - radius, y - radius, x + radius, y + radius], fill=dark)
    elif name == "square":
        draw.rectangle([x - radius, y - radius, x + radius, y + radius], fill=dark)
    else:
        corners = [(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)]
        draw.polygon(corners, fill=dark)
    return image.convert(MODES[int(rng.integers(len(MODES)))])


def write_shapes(folder, count, broken=0, seed=0):
    """Write `count` pictures to a folder for each class; the first `broken` are truncated."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        name = CLASSES[number % len(CLASSES)]
        image = picture(name, rng)
        path = folder / name / f"{number:03}.{'jpg' if image.mode in ('RGB', 'L') else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
        if number < broken:
            path.write_bytes(path.read_bytes()[:50])
    return folder
