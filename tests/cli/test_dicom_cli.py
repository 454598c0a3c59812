"""DICOM files from the command line: nothing of a header but pixels leaves its file."""

import numpy as np
import yaml

from tests.conftest import SMALL
from tests.data.files import BORN, CLASSES, NAME, dicom
from tests.hospitals import site_file

PATIENT = "Wren"
SECRETS = (*NAME.split("^"), BORN, PATIENT)
SITE = {
    "shape": [1, 8, 8],
    "fit": "pad",
    "classes": list(CLASSES),
    "num_clients": 1,
    "queries": 10_000,
}


def write_scans(folder):
    """Forty pictures of twenty patients; and one that cannot be read."""
    rng = np.random.default_rng(0)
    for number in range(40):
        place = folder / CLASSES[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 2**12, (8, 12), np.uint16)
        content = dicom(pixels, 12, PatientID=f"{PATIENT}{number // 2}")
        (place / f"IM{number:03}").write_bytes(content)
    (folder / CLASSES[0] / "IM999").write_bytes(content[:-20])
    return folder


def holding(folder):
    """The top folders of files that hold a secret."""
    return {
        file.relative_to(folder).parts[0]
        for file in folder.rglob("*")
        if file.is_file() and any(secret.encode() in file.read_bytes() for secret in SECRETS)
    }


def test_a_simulation_keeps_no_header(fed_dpsd, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("FED_DPSD_HOME", str(tmp_path / "home"))
    write_scans(tmp_path / "scans")
    overrides = "data=imagefolder", "data.path=scans", "data.shape=[1,8,8]", "data.fit=stretch"
    overrides += "data.patient_column=PatientID", "num_clients=1"
    code, shown, err = fed_dpsd("data", *overrides)
    assert code == 0
    assert "fit: stretch; window: null" in shown
    assert "(5 patients) to test" in shown[1]
    code, printed, more = fed_dpsd("run", *SMALL, "rounds=1", *overrides)
    assert code == 0
    said = "\n".join((*shown, err, *printed, more, caplog.text))
    assert "IM999" in said  # it is named, with the reason
    assert not [secret for secret in SECRETS if secret in said]
    assert {"home", "runs"} <= {path.name for path in tmp_path.iterdir()}
    assert holding(tmp_path) == {"scans"}


def test_a_hospital_keeps_no_header(fed_dpsd, tmp_path, caplog):
    write_scans(tmp_path / "scans")
    files = {"path": "scans", "image_column": "image", "label_column": "label"}
    files |= {"patient_column": "PatientID", "skip_unreadable": True, "window": [2_000, 3_000]}
    sums = {"methods": ["class_statistics"], "answers": ["class_statistics"]}
    file = site_file(tmp_path, files=files, models=["scattering"], **sums, **SITE)
    assert yaml.safe_load(file.read_text())["fit"] == "pad"
    (tmp_path / "scans.npz").unlink()
    code, out, err = fed_dpsd("site", "check", str(file))
    assert (code, err) == (0, "")
    said = "\n".join((*out, caplog.text))
    assert "records: 41 files found, 40 used, 1 skipped: 1 unreadable (ill/IM999: its DICOM" in said
    assert "patients: 20" in said
    assert "fit: pad; window: [2000.0, 3000.0]" in said
    assert "patient, because patient_column is PatientID" in said
    assert not [secret for secret in SECRETS if secret in said]
    assert (tmp_path / "state").is_dir()
    assert holding(tmp_path) == {"scans"}
