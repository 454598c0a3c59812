"""The text of a method's settings, which keys a client's noise."""

import hashlib
import json

from fed_dpsd.client.method_text import method_text
from tests.conftest import composed
from tests.every import every

DEFAULT = "c804b99c53a46baef193504283527593567c65c3c0e1c28a70b8787f5eaa569b"


def settings(*overrides):
    return composed(*overrides)["method"]


def test_the_default_methods_text_is_what_its_noise_was_always_keyed_by():
    assert hashlib.sha256(method_text(settings()).encode()).hexdigest() == DEFAULT


@every("method", ["fed_dpsd", "dpsd", "paper_dpsd", "feddf", "fedprox"])
def test_every_setting_changes_the_text(method):
    known = settings(f"method={method}")
    own = [key for key in known if key not in ("name", "needs")]
    texts = {method_text(known)} | {method_text({**known, key: "other"}) for key in own}
    assert len(texts) == len(own) + 1
    assert method_text({**known, "needs": {"rounds": 1}}) == method_text(known)


def test_methods_that_are_settings_of_others_keep_the_class_that_they_had():
    had = {"central": "central.Central", "direct": "direct.Direct", "dgd_plus": "dgd_plus.DGDPlus"}
    had |= {"dp_fedavg": "dp_fedavg.DPFedAVG", "dpdfd": "dpdfd.DPDFD", "dgd": "dgd.DGD"}
    had |= {"paper_dpsd": "paper_dpsd.PaperDPSD", "ensemble": "ensemble.WholeEnsemble"}
    texts = {name: method_text(settings(f"method={name}")) for name in had}
    assert {name: json.loads(text)["_class_"] for name, text in texts.items()} == had
    other = {**settings("method=dgd_plus"), "name": "mine"}
    assert json.loads(method_text(other))["_class_"] == "dgd.DGD"


def test_each_polarity_has_a_text_of_its_own():
    known = settings()
    texts = {method_text({**known, "polarity": name}) for name in ("both", "answers", "dark")}
    assert len(texts) == 3
