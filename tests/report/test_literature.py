"""Numbers from papers: the files hold them as printed, and configurations and tables use them."""

import functools
import operator
import re
from pathlib import Path

import pytest

from fed_dpsd.report.literature import read_papers
from tests import pages
from tests.conftest import composed
from tests.tables import cells_by_name, cells_of, read_files

ROOT = Path(__file__).parents[2]
PAPERS = {
    paper: {name: number["printed"] for name, number in numbers.items()}
    | {f"{name}_epsilon": number.get("epsilon") for name, number in numbers.items()}
    | cells_by_name(read_files()[paper])
    for paper, numbers in read_papers().items()
}
# The settings of a paper's printed loop: a file, and the number of each key.
SETTINGS = {
    "experiment=paper_fed_dpsd": {
        **{"num_clients": "DPSD m", "rounds": "DPSD T", "queries_per_round": "DPSD b"},
        **{"answers.noise_multiplier": "DPSD sigma", "answers.bound": "DPSD beta_10"},
        **{"answers.stability": "DPSD h", "privacy.epsilon_stated": "DPSD federated_10_epsilon"},
        **{"method.label_step": "DPSD gamma_s", "method.student_learning_rate": "DPSD gamma_s"},
        **{"method.generator_learning_rate": "DPSD gamma_g", "method.balance": "DPSD lambda"},
        **{"method.one_hot_weight": "DPSD weight", "method.entropy_weight": "DPSD weight"},
        "method.activation_weight": "DPSD weight",
    },
    "experiment=paper_fed_dpsd_label": {
        **{"num_clients": "DPSD m", "rounds": "DPSD T", "queries_per_round": "DPSD b"},
        **{"answers.k": "DPSD k", "answers.epsilon_per_answer": "DPSD federated_10_epsilon"},
        "privacy.epsilon_stated": "DPSD federated_10_epsilon",
    },
    "experiment=paper_dpsd": {
        **{"answers.bound": "DPSD beta", "answers.k": "DPSD k", "rounds": "DPSD T"},
        "privacy.epsilon_stated": "DPSD data_1_epsilon",
    },
    "experiment=paper_dpsd_label": {
        **{"answers.epsilon_per_answer": "DPSD label_1_epsilon", "rounds": "DPSD T"},
        "privacy.epsilon_stated": "DPSD label_1_epsilon",
    },
    "experiment=dense_published": {
        **{"model.teacher_width": "DENSE width", "model.student_width": "DENSE width"},
        **{"model.generator_width": "DENSE generator_width", "teacher.epochs": "DENSE epochs"},
        **{"teacher.batch_size": "DENSE batch", "teacher.learning_rate": "DENSE rate"},
        **{"teacher.momentum": "DENSE momentum"},
    },
    "method=dense": {
        **{"method.generator_steps": "DENSE T_G", "method.batch_norm_weight": "DENSE weight"},
        **{"method.generator_learning_rate": "DENSE generator_rate"},
        **{"method.one_hot_weight": "DENSE weight", "method.adversarial_weight": "DENSE weight"},
    },
    "method=dgd": {
        **{"method.generator_steps": "DGD generator_rounds", "method.entropy_weight": "DGD alpha"},
        **{"method.activation_weight": "DGD beta", "method.code_size": "DGD c"},
        **{"method.vae_steps": "DGD rounds", "method.student_steps": "DGD rounds"},
        **{"method.learning_rate": "DGD rate", "method.batch_size": "DGD b"},
    },
    "method=dp_dfd": {
        **{"method.entropy_weight": "DP-DFD alpha", "method.activation_weight": "DP-DFD beta"},
    },
    "method=feddafl": {
        **{"method.student_learning_rate": "DAFL lr_S", "method.one_hot_weight": "DAFL oh"},
        **{"method.activation_weight": "DAFL a"},
    },
}
PAGES = pages.names()
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
CELLS = re.compile(r"(?<!\\)\|")


def published_in_tables(file):
    """The numbers of a page in columns headed published, and in rows marked *published*."""
    head = []
    for line in (ROOT / file).read_text().splitlines():
        row = [cell.strip() for cell in CELLS.split(line)[1:-1]] if line.startswith("|") else []
        head = row if not head else head if row else []
        marked = any("*published*" in cell for cell in row)
        for title, cell in zip(head, row, strict=True) if row else ():
            if marked or re.search(r"\bpublished\b", title, re.IGNORECASE):
                yield from re.findall(rf"^{NUMBER}", cell)


# Cells as the papers print them, typed apart from the files: paper, table, row, column, number.
# DPDFD prints fractions.
CELLS_AS_PRINTED = """
DPSD  | Table I   | GS-WGAN      | CelebA-H, 10  | 52.25
DPSD  | Table I   | DPGEN        | FMNIST, 10    | 87.84
DPSD  | Table I   | DPSD         | MNIST, 1      | 96.03
DPSD  | Table I   | DPSD         | CelebA-G, 1   | 73.74
DPSD  | Table II  | DataLens     | COVIDx, 1     | 48.61
DPSD  | Table II  | DPSD         | MedMNIST, 10  | 86.01
DPSD  | Table III | TSADP        | CIFAR10       | 66.20
DPSD  | Table III | Spectral-DP  | MNIST         | 95.77
DPSD  | Table IV  | LP-2ST       | CelebA-G, 8   | 74.10
DPSD  | Table IV  | DPSD         | CelebA-H, 2   | 88.12
DPSD  | Table V   | FedADI       | CIFAR10       | 59.34
DPSD  | Table V   | FedDPSD      | ImageNet      | 39.13
DPSD  | Table VI  | without IE   | mnist, gradients      | 66.37
DPSD  | Table VI  | without CE   | fashion_mnist, labels | 88.04
DPDFD | Table 1   | P3GM         | FMNIST, 10    | 0.7480
DPDFD | Table 1   | DPDFD        | CelebA-H, 1   | 0.7839
DPDFD | Table 2   | TOPAGG       | CIFAR10       | 0.8518
DPDFD | Table 2   | DGD          | MNIST         | 0.7360
DPDFD | Table 3   | WideResNet   | 2             | 0.5997
DPDFD | Table 3   | ViT          | 5             | 0.7240
DPDFD | Table 4   | MNIST, 0.7   | TOPAGG        | 0.9382
DPDFD | Table 4   | CIFAR10, 8.0 | GM-DP         | 0.8705
DPDFD | Table 5   | without CE   | FMNIST        | 0.7649
DPDFD | Table 5   | without NORM | MNIST         | 0.9496
DPDFD | Table 5 of the proceedings | MNIST  | 50  | 0.8314
DPDFD | Table 5 of the proceedings | FMNIST | 500 | 0.8142
DPDFD | Table 6   | Teacher      | COVIDx, 1     | 0.8818
DPDFD | Table 6   | DPDFD        | PathMNIST, 10 | 0.8589
DPDFD | Table 7   | CelebA-G, 1  | DPDFD-MM      | 0.7312
DPDFD | Table 7   | MNIST, 10    | DPDFD         | 0.9751
DGD   | Table I   | GS-WGAN      | FMNIST, 1     | 16.6
DGD   | Table I   | DGD          | MNIST, 10     | 97.4
DGD   | Table II  | GEDDP        | CIFAR10       | 55.0
DGD   | Table II  | DGD          | epsilon       | 3.00
"""


def test_cells_of_every_table_are_as_the_papers_print_them():
    seen, papers = set(), read_files()
    for line in CELLS_AS_PRINTED.split("\n")[1:-1]:
        paper, number, row, column, printed = (word.strip() for word in line.split("|"))
        table = papers[paper]["tables"][number]
        cell = table["rows"][row][table["columns"].index(column)]
        assert float(cell) == pytest.approx(float(printed) * (100 if paper == "DPDFD" else 1))
        seen.add((paper, number))
    assert seen == {(name, table) for name, paper in papers.items() for table in tables_of(paper)}


def tables_of(paper):
    return paper.get("tables", {})


def test_rows_have_a_cell_a_column_and_every_cell_is_a_percentage():
    for paper in read_files().values():
        for number, table in tables_of(paper).items():
            assert {len(row) for row in table["rows"].values()} == {len(table["columns"])}, number
            cells = [float(cell) for cell in cells_of(table) if cell != "-"]
            assert cells
            assert all(0 <= cell <= 100 for cell in cells), number


def test_a_number_of_a_table_is_in_that_table():
    for name, paper in read_files().items():
        for key, number in paper["numbers"].items():
            table = tables_of(paper).get(number["in"])
            assert not table or number["printed"] in cells_of(table), (name, key)


def test_what_is_not_in_the_papers_text_is_said_so():
    for paper in read_files().values():
        for number, figure in paper.get("figures", {}).items():
            assert set(figure) == {"of", "said", "points"}, number


def test_a_loop_as_printed_is_set_to_what_the_papers_print():
    for choice, keys in SETTINGS.items():
        whole = composed(choice)
        for key, number in keys.items():
            paper, name = number.split()
            value = functools.reduce(operator.getitem, key.split("."), whole)
            assert float(value) == float(PAPERS[paper][name]), (choice, key)


def test_tables_hold_no_other_published_number():
    """The numbers of results/papers.md are compared by tests/test_papers.py."""
    printed = {number for paper in PAPERS.values() for number in paper.values()}
    found = {page: set(published_in_tables(page)) for page in PAGES if page != "results/papers.md"}
    assert found["results/one_teacher.md"]
    assert {page: extra for page in found if (extra := found[page] - printed)} == {}
