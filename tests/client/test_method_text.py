"""The text of a method's settings, which keys a client's noise."""

import hashlib

from fed_dpsd.client.method_text import method_text
from tests.conftest import composed

DEFAULT = "c804b99c53a46baef193504283527593567c65c3c0e1c28a70b8787f5eaa569b"


def settings(*overrides):
    return composed(*overrides)["method"]


def test_the_default_methods_text_is_what_its_noise_was_always_keyed_by():
    assert hashlib.sha256(method_text(settings()).encode()).hexdigest() == DEFAULT


def test_every_setting_changes_the_text(subtests):
    for method in ["fed_dpsd", "dpsd", "paper_dpsd", "feddf", "fedprox"]:
        with subtests.test(method=method):
            known = settings(f"method={method}")
            texts = {method_text(known)} | {method_text({**known, key: "other"}) for key in known}
            assert len(texts) == len(known) + 1


def test_each_polarity_has_a_text_of_its_own():
    known = settings()
    texts = {method_text({**known, "polarity": name}) for name in ("both", "answers", "dark")}
    assert len(texts) == 3
