"""What a run read: which changes of its data and files count, and what is refused then."""

import os
import shutil
from types import SimpleNamespace

import pytest
from torch import nn

from fed_dpsd import api
from fed_dpsd.audits import shadows
from fed_dpsd.client.teachers import make_teacher
from fed_dpsd.engines import clients
from fed_dpsd.engines.clients import prepare_clients
from fed_dpsd.engines.flower import server
from fed_dpsd.engines.ready import check_run
from fed_dpsd.errors import UserError
from fed_dpsd.experiment import forget_data, from_overrides
from fed_dpsd.models import functions, write_weights
from fed_dpsd.models.classifiers import CLASSIFIERS
from fed_dpsd.server.inputs import inputs_of, recorded_inputs
from fed_dpsd.server.run_folder import new_run_folder
from tests.conftest import SMALL
from tests.data.files import picture, shades, table

IMAGES, LABELS = ("training images", "test images"), ("training labels", "test labels")


def folders(place):
    """Class folders in train and test, with pictures of 24 shades."""
    shades(place / "train", ill=range(8), well=range(10, 18))
    shades(place / "test", ill=range(20, 24), well=range(30, 34))
    return place


def tables(place, change):
    """A changed train.csv and a test.csv, with patients of two pictures each."""
    for split, first in (("train", 0), ("test", 40)):
        numbers = range(first, first + 8)
        rows = [f"{n}.png,{('ill', 'well')[n % 2]},p{n // 2}" for n in numbers]
        for n in numbers:
            picture(place / f"{n}.png", n)
        table(place / f"{split}.csv", change(rows) if first == 0 else rows, "image,label,patient")
    return place


DATA = ("data=imagefolder", "data.shape=[1,8,8]", "partition=iid", "num_clients=2")


def experiment_on(place, tmp_path, *overrides):
    """A small experiment on the data at a place, read now."""
    forget_data()
    data = (*DATA, f'data.path="{place}"', f"out={tmp_path}/runs", f"cache={tmp_path}/cache")
    return from_overrides([*SMALL, *data, *overrides], tmp_path)


def changed(before, after):
    """The names of the inputs that differ."""
    return {name for name in before | after if before.get(name) != after.get(name)}


# --- which changes count ---


def touch(place):
    for file in place.rglob("*.png"):
        os.utime(file, (1, 1))


def rename(place):
    (place / "train" / "ill" / "0.png").rename(place / "train" / "ill" / "z.png")


def store_elsewhere(place):
    """Leave a link where the folder was."""
    place.symlink_to(place.rename(place.with_name("elsewhere")))


def encode_otherwise(place):
    picture(place / "train" / "ill" / "0.bmp", 0)
    (place / "train" / "ill" / "0.png").unlink()


def add(place):
    picture(place / "train" / "ill" / "new.png", 99)


def remove(place):
    (place / "train" / "well" / "10.png").unlink()


def repaint(place):
    """Change a picture's pixels, but neither its size nor its time."""
    file = place / "train" / "ill" / "0.png"
    before = file.stat()
    picture(file, 50)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def relabel(place):
    (place / "train" / "ill" / "0.png").rename(place / "train" / "well" / "0.png")


def add_to_test(place):
    picture(place / "test" / "ill" / "new.png", 99)


@pytest.mark.parametrize("change", [touch, rename, store_elsewhere, encode_otherwise])
def test_names_times_places_and_formats_of_files_do_not_count(tmp_path, change):
    place = folders(tmp_path / "D")
    before = inputs_of(experiment_on(place, tmp_path))
    change(place)
    assert inputs_of(experiment_on(place, tmp_path)) == before


@pytest.mark.parametrize(
    ("change", "part"),
    [
        *((add, "training images"), (remove, "training images"), (repaint, "training images")),
        *((relabel, "training labels"), (add_to_test, "test images")),
    ],
)
def test_pixels_and_labels_of_both_splits_count(tmp_path, change, part):
    place = folders(tmp_path / "D")
    before = inputs_of(experiment_on(place, tmp_path))
    change(place)
    found = changed(before, inputs_of(experiment_on(place, tmp_path)))
    assert part in found
    assert {name.split()[0] for name in found} == {part.split()[0]}


def test_a_tables_rows_count_in_their_order_unless_patients_are_named(tmp_path):
    """Records of a divided table keep its order, by which they are dealt."""

    def found(name, change, *overrides):
        place = tables(tmp_path / name, change)
        return inputs_of(experiment_on(place, tmp_path, *overrides))

    def same(rows):
        return rows

    def reverse(rows):
        return rows[::-1]

    def move(rows):
        return [rows[0].replace("p0", "p3"), *rows[1:]]

    assert changed(found("a", same), found("b", same)) == set()
    assert changed(found("a", same), found("c", reverse)) == {IMAGES[0], LABELS[0]}
    patients = "data.patient_column=patient"
    before = found("a", same, patients)
    assert changed(before, found("c", reverse, patients)) == set()
    assert changed(before, found("d", move, patients)) == {"training patients"}


def test_files_that_a_run_reads_count_by_their_content(tmp_path):
    place, weights = folders(tmp_path / "D"), tmp_path / "teacher.safetensors"
    own = (f'teacher.path="{weights}"', "teacher.arch=cnn", "training=plain", "answers=label")

    def found():
        return inputs_of(experiment_on(place, tmp_path, *own))

    plain = from_overrides([*SMALL, *DATA, f'data.path="{place}"', "model.teacher=cnn"], tmp_path)
    write_weights(make_teacher(plain.config, 0, 0), weights)
    before = found()
    os.utime(weights, (1, 1))
    assert found() == before
    stat = weights.stat()
    write_weights(make_teacher(plain.config, 1, 0), weights)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # with its old size and time
    assert changed(before, found()) == {"teacher.path"}


def test_a_coordinator_reads_its_test_images_alone(deployed, small):
    whole = inputs_of(small())
    assert inputs_of(deployed()) == {name: whole[name] for name in ("test images", "test labels")}
    without = deployed("data=folder", "data.num_classes=2", "data.shape=[1,8,8]")
    assert recorded_inputs(without, new_run_folder(without)) == inputs_of(without) == {}


def test_with_secret_noise_the_run_folder_holds_no_digest_of_records(small):
    """Whoever knows all records but one could test this one."""
    for noise, inside in (("seeded", True), ("secure", False)):
        experiment = small(f"noise={noise}")
        folder, digests = new_run_folder(experiment), inputs_of(experiment)
        assert recorded_inputs(experiment, folder) == digests
        files = [path for path in folder.iterdir() if path.is_file()]
        texts = [path.read_text() for path in files]
        assert any(digests["training labels"] in text for text in texts) == inside


def test_runs_of_one_name_that_share_a_ledger_keep_their_own_inputs(tmp_path):
    """Also in a copy of a run folder, and in a renamed one."""
    place, kept = folders(tmp_path / "D"), []
    for parent in ("a", "b"):
        shared = "noise=secure", f"ledger={tmp_path}/ledger", f"run_folder={tmp_path}/{parent}/r"
        experiment = experiment_on(place, tmp_path, *shared)
        kept.append((new_run_folder(experiment), inputs_of(experiment)))
        add(place)
    (first, before), (second, after) = kept
    assert before != after
    shutil.copytree(first, tmp_path / "copy")
    second = second.rename(tmp_path / "b" / "renamed")
    for folder, own in ((first, before), (second, after), (tmp_path / "copy", before)):
        assert recorded_inputs(experiment, folder) == own


# --- what is refused, and reused ---


@pytest.fixture
def started(tmp_path):
    """A run on a folder that has started, and its data."""
    place = folders(tmp_path / "D")
    return new_run_folder(experiment_on(place, tmp_path)), place


def test_a_run_whose_data_has_changed_is_not_resumed(started):
    folder, place = started
    said = f"^{folder}: this run read other training images, training labels; restore what it had"
    touch(place)
    assert not api.resumed_job(folder).completed  # the control
    add(place)
    with pytest.raises(UserError, match=said):
        api.resumed_job(folder)
    forget_data()
    with pytest.raises(UserError, match=said):
        server.prepare(SimpleNamespace(get_node_ids=list), {"resume": str(folder)})
    (place / "train" / "ill" / "new.png").unlink()
    api.resumed_job(folder)
    (folder / "inputs.json").unlink()
    with pytest.raises(UserError, match="this run has no inputs.json, which says what it read"):
        api.resumed_job(folder)


def test_a_coordinator_with_other_test_images_does_not_resume(deployed, tmp_path):
    place = folders(tmp_path / "D")
    experiment = deployed(*DATA[:2], f'data.path="{place}"', "data.num_classes=2")
    folder = new_run_folder(experiment)
    add(place)  # of its training images, which a coordinator does not read: the control
    check_run(experiment, lambda: None, folder)
    add_to_test(place)
    with pytest.raises(UserError, match=f"^{folder}: this run read other test images, test labels"):
        check_run(experiment, lambda: None, folder)


def test_a_run_with_another_function_of_the_same_name_is_not_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(functions, "_MADE", {})

    def give(width):
        def make_net():
            return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 2))

        return functions.add_functions({"student": make_net})["student"]

    place, name = folders(tmp_path / "D"), give(4)
    folder = new_run_folder(experiment_on(place, tmp_path, f"model.student='{name}'"))
    give(4)
    api.resumed_job(folder)  # the control
    give(5)
    with pytest.raises(UserError, match="this run read other .*make_net"):
        api.resumed_job(folder)
    del CLASSIFIERS[name]


def test_an_attack_needs_the_data_that_its_runs_read(tmp_path):
    place = folders(tmp_path / "D")
    coins = ("partition=coins", "partition.fraction=0.5")
    folder = new_run_folder(experiment_on(place, tmp_path, *coins))
    shadows._open_shadow_run(folder)  # the control
    relabel(place)
    forget_data()
    with pytest.raises(UserError, match="this run read other training labels; restore"):
        shadows._open_shadow_run(folder)


def test_a_process_reads_data_again_for_each_run(tmp_path):
    place = folders(tmp_path / "D")
    typed = (*SMALL, *DATA, f"data.path={place}", f"out={tmp_path}/runs")
    before = api.new_job(typed)
    sites = [clients.Clients(before.experiment, before.folder)[0]]
    add(place)
    add_to_test(place)
    after = api.new_job(typed)
    sites.append(clients.Clients(after.experiment, after.folder)[0])
    assert [len(site._test) for site in sites] == [8, 9]
    assert sum(site.num_records for site in sites) == 17
    inputs = [recorded_inputs(each.experiment, each.folder) for each in (before, after)]
    assert changed(*inputs) == {*IMAGES, *LABELS}


# --- a lasting ledger ---


def used_ledger(experiment, client=0):
    ledger = clients.shared_ledger(experiment, client)
    with ledger.transaction():
        ledger.store_note("used", b"")
    return ledger


def test_a_ledger_is_refused_for_other_training_records(tmp_path):
    """One more picture deals the records anew, so no ledger would hold a record's total."""
    place, lasting = folders(tmp_path / "D"), f"ledger={tmp_path}/L"
    used_ledger(experiment_on(place, tmp_path, lasting))
    for same in (touch, add_to_test):
        same(place)
        prepare_clients(experiment_on(place, tmp_path, lasting), 1)  # the control
    for other in (relabel, add):
        copy = shutil.copytree(place, tmp_path / other.__name__)
        other(copy)
        with pytest.raises(
            UserError, match="is the account of .*keep the data set.*use another ledger folder"
        ):
            prepare_clients(experiment_on(copy, tmp_path, lasting), 1)
    other = experiment_on(place, tmp_path, lasting, "data.records_per_patient=2")
    with pytest.raises(UserError, match="is the account of"):  # of other patients
        prepare_clients(other, 1)


def test_a_ledger_of_more_clients_is_refused(tmp_path):
    """Records of a client that no longer takes part would be dealt to others."""
    place, lasting = folders(tmp_path / "D"), f"ledger={tmp_path}/L"
    used_ledger(experiment_on(place, tmp_path, lasting), client=1)
    prepare_clients(experiment_on(place, tmp_path, lasting), 1)
    with pytest.raises(UserError, match="client_001.sqlite is the account of client 1, .*of 2 by"):
        prepare_clients(experiment_on(place, tmp_path, lasting, "num_clients=1"), 1)
