"""Records of a client."""

import numpy as np
import pytest

from fed_dpsd.experiment import load_data


@pytest.fixture
def records(small):
    """Sixty digits."""
    config = small().config
    return load_data(config.data, config.cache).train.take(np.arange(60))
