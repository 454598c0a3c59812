"""Records of a client."""

import numpy as np
import pytest

from fed_dpsd.experiment import load_data
from fed_dpsd.privacy.noise import SecretStreams

SECRET = SecretStreams(bytes(range(32)))


@pytest.fixture
def records(small):
    """Sixty digits."""
    config = small().config
    return load_data(config.data, config.cache).train.take(np.arange(60))
