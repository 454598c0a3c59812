"""Pictures: several arrays are read as one."""

import numpy as np
import pytest

from fed_dpsd.models.pictures import Pictures

PARTS = [np.random.default_rng(n).integers(0, 256, (n, 3, 8, 8), dtype=np.uint8) for n in (4, 1, 7)]
WHOLE = np.concatenate(PARTS)


@pytest.mark.parametrize(
    "chosen",
    [
        slice(None),
        slice(3, 6),
        slice(10, 99),
        slice(0, 0),
        np.array([11, 0, 4, 4, 3]),
        np.array([]),
    ],
)
def test_images_are_those_of_the_joined_arrays(chosen):
    chosen = chosen if isinstance(chosen, slice) else chosen.astype(np.int64)
    for pictures in (Pictures(PARTS), Pictures([Pictures(PARTS[:2]), PARTS[2]])):
        assert (pictures[chosen] == WHOLE[chosen]).all()
        assert pictures[chosen].shape == WHOLE[chosen].shape
        assert (len(pictures), pictures.shape) == (12, WHOLE.shape)


def test_an_image_beyond_the_last_is_an_error():
    with pytest.raises(IndexError):
        Pictures(PARTS)[np.array([12])]


def test_what_is_read_is_a_copy():
    Pictures(PARTS)[np.array([0])][:] = 0
    assert (np.concatenate(PARTS) == WHOLE).all()
