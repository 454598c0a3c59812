"""Whitening in less than a second."""

import pytest

from fed_dpsd.models import fixed_features, patches, scattering


@pytest.fixture(scope="module")
def few_examples():
    """Fixed features are whitened by an eighth of the images in a whole module."""
    caches = patches.patterns, fixed_features.whitening, fixed_features._remembered
    with pytest.MonkeyPatch.context() as patch:
        for module in (patches, scattering):
            patch.setattr(module, "EXAMPLES", module.EXAMPLES // 8)
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()
