"""DICOM files, from the command line and at hospitals: of a header, only pixels leave its file."""

import csv

import numpy as np
import pytest
import yaml
from PIL import Image

from fed_dpsd.engines.flower.grid import GridFederation
from fed_dpsd.server import run as runs
from fed_dpsd.server.run_folder import new_run_folder
from tests.conftest import SMALL
from tests.data.files import BORN, CLASSES, NAME, dicom
from tests.hospitals import Hospitals, site_file

PATIENT = "Wren"
SECRETS = (*NAME.split("^"), BORN, PATIENT)
SITE = {
    "shape": [1, 8, 8],
    "fit": "pad",
    "classes": list(CLASSES),
    "num_clients": 1,
    "queries": 10_000,
}


def pictures(seed=0):
    """Forty pictures of twenty patients: the class, the patient and the pixels of each."""
    rng = np.random.default_rng(seed)
    for number in range(40):
        pixels = rng.integers(0, 2**12, (8, 12), np.uint16)
        yield CLASSES[number % 2], f"{PATIENT}{number // 2}", pixels


def write_scans(folder, seed=0):
    """The pictures as DICOM, and one that cannot be read."""
    for number, (label, patient, pixels) in enumerate(pictures(seed)):
        (folder / label).mkdir(parents=True, exist_ok=True)
        content = dicom(pixels, 12, PatientID=patient)
        (folder / label / f"IM{number:03}").write_bytes(content)
    (folder / CLASSES[0] / "IM999").write_bytes(content[:-20])


def write_table(folder, seed):
    """The same pictures as PNG, in a table."""
    folder.mkdir(parents=True)
    with (folder / "scans.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "label", "patient"])
        for number, (label, patient, pixels) in enumerate(pictures(seed)):
            Image.fromarray(pixels).save(folder / f"{number}.png")
            rows.writerow([f"{number}.png", label, patient])


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


@pytest.mark.slow
def test_hospitals_with_dicom_files_teach_as_those_with_the_same_png_files(deployed, tmp_path):
    """With the same secrets, which the noise of the training comes from."""
    students = {}
    settings = "training=dp_sgd", "training.steps=2", "training.noise_multiplier=5", "rounds=1"
    settings += "answers=probabilities", "num_clients=3", "queries_per_round=16"
    settings += "data=folder", "data.patient_column=who", "data.shape=[1,8,8]", "data.fit=pad"
    settings += f"data.classes=[{','.join(CLASSES)}]", "data.num_classes=null"
    for form in ("dicom", "png", "darker png"):
        sites = []
        for client in range(3):
            files = {"image_column": "image", "label_column": "label", "skip_unreadable": True}
            if form == "dicom":
                write_scans(tmp_path / "scans" / f"{client}", client)
                files |= {"path": f"{tmp_path}/scans/{client}", "patient_column": "PatientID"}
            else:
                write_table(tmp_path / "tables" / form / f"{client}", client)
                files["path"] = f"{tmp_path}/tables/{form}/{client}/scans.csv"
                files |= {"pixel_bits": 12 if form == "png" else 13, "patient_column": "patient"}
            place = tmp_path / form / f"{client}"
            sites.append(site_file(place, client, files=files, **SITE | {"num_clients": 3}))
            (place / "state").mkdir()
            secret = place / "state" / "secret"
            secret.write_bytes(bytes([client]) * 32)
            secret.chmod(0o600)
        experiment = deployed(*settings, one=False)
        folder = new_run_folder(experiment)
        federation = GridFederation(experiment, Hospitals(sites), folder)
        summary = runs.run(experiment, federation, folder, lambda line: None)
        students[form] = summary["student_sha256"]
    assert students["dicom"] == students["png"] != students["darker png"]
    assert holding(tmp_path) == {"scans", "tables"}
