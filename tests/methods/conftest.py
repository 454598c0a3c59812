"""Records of methods that sum over them."""

import pytest


@pytest.fixture
def records(small):
    """Sixty digits, of twenty patients."""
    import numpy as np

    from fed_dpsd.data.intake import Records
    from fed_dpsd.experiment import load_data

    config = small().config
    split = load_data(config.data, config.cache).train.take(np.arange(60))
    return Records(split.images, split.labels, np.arange(60) // 3)
