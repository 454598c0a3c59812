"""The text that represents a method's settings in the digests of charges."""

import json
import re
from collections.abc import Mapping
from typing import Any

_PACKAGES = re.compile(r"^fed_dpsd\.(methods|papers)\.")
_NAMES = {
    "_target_": "_class_",
    "areas_fraction": "areas_share",
    "lines_fraction": "lines_share",
    "noise_fraction": "noise_share",
    "polarity": "turn",
    "prediction_weight": "commitment",
}
_POLARITIES = {"both": False, "answers": True}
_LEFT_OUT = {
    "distillation": "decoupled",
    "gradients_of": "probabilities",
    "leaves_fraction": 0.0,
    "objects_fraction": 0.0,
    "pooling": "mean",
    "recombined_fraction": 0.0,
}
# Of FedDPSD and DPSD, for the student's training.
_STUDENT = {"temperature": 1.0, "shift": 0, "flip": False, "final_fit": "steps"}
_NOT_LITERAL = "fed_dpsd.FedDPSD", "dpsd.DPSD"
# Classes that methods had before they became settings of others, by class and name.
_CLASSES = {
    ("ensemble.WholeEnsemble", "central"): "central.Central",
    ("ensemble.WholeEnsemble", "direct"): "direct.Direct",
    ("fedavg.DPFedAVG", "dp_fedavg"): "dp_fedavg.DPFedAVG",
    ("dgd.DGD", "dgd_plus"): "dgd_plus.DGDPlus",
    ("paper_fed_dpsd.PaperFedDPSD", "dpdfd"): "dpdfd.DPDFD",
    ("paper_fed_dpsd.PaperFedDPSD", "paper_dpsd"): "paper_dpsd.PaperDPSD",
}
_WITHOUT_EFFECT = "name", "needs"  # on what a client does


def method_text(method: Mapping[str, Any]) -> str:
    """Return a method's settings as text; different settings have different texts.

    A client's noise is keyed by digests of this text. Any change to it, even of a name, changes the
    noise and therefore the student of every seeded run, so the text has its own names for keys,
    which never change.

    Args:
        method: the values of the group `method`, with `_target_`.
    """
    left_out = _LEFT_OUT | (_STUDENT if "final_student_steps" in method else {})
    kept = {
        key: value
        for key, value in method.items()
        if (key, value) not in left_out.items() and key not in _WITHOUT_EFFECT
    }
    text = {_NAMES.get(key, key): value for key, value in kept.items()}
    if "turn" in text:
        text["turn"] = _POLARITIES.get(text["turn"], text["turn"])
    own = _PACKAGES.sub("", str(text["_class_"]))
    text["_class_"] = _CLASSES.get((own, method.get("name")), own)
    if text["_class_"] in _NOT_LITERAL:
        text["literal"] = False
    return json.dumps(text, sort_keys=True)
