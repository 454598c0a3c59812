"""Numbers that are quoted from papers are those of literature.yaml, wherever they are quoted."""

import re
from pathlib import Path

import pytest

from fed_dpsd.report.literature import published, read_papers
from tests.tables import cells_by_name, cells_of, read_files

ROOT = Path(__file__).parents[2]
PAPERS = {
    paper: {name: number["printed"] for name, number in numbers.items()}
    | {f"{name}_epsilon": number.get("epsilon") for name, number in numbers.items()}
    | cells_by_name(read_files()[paper])
    for paper, numbers in read_papers().items()
}
ONE_TEACHER = "docs/results/one_teacher.md"
DENSE_TRAINING = [
    "epochs: {DENSE[epochs]} batch_size: {DENSE[batch]} learning_rate: {DENSE[rate]} "
    "momentum: {DENSE[momentum]}",
    'method.shift: "{DENSE[shift]}" method.flip: "true" method.student_learning_rate: '
    '"{DENSE[student_rate]}" method.batch_size: "{DENSE[images]}" method.temperature: '
    '"{DENSE[temperature]}"',
]
GRADIENTS = [
    "noise_multiplier: {DPSD[sigma]}.0",
    "bound: {DPSD[beta]} # beta of the paper",
    "stability: {DPSD[h]} # h of the paper",
]
# The files that quote, and a text for each quotation; {PAPER[name]} stands for a number.
QUOTATIONS = {
    "docs/commands.md": ["model=cnn answers=gradient rounds={DPSD[T]}"],
    "conf/answers/gradient.yaml": GRADIENTS,
    "conf/answers/gradient_reading.yaml": GRADIENTS,
    "conf/data/celeba_gender.yaml": ["k of the paper: {DPSD[k_celeba_gender]} (answers.k)."],
    "conf/data/celeba_hair.yaml": ["k of the paper: {DPSD[k]} (answers.k)."],
    "conf/data/cifar10.yaml": ["k of the paper: {DPSD[k]} (answers.k)."],
    "conf/data/cifar100.yaml": ["k of the paper: {DPSD[k_cifar100]} (answers.k)."],
    "conf/data/covidx.yaml": ["k of the paper: {DPSD[k]} (answers.k)."],
    "conf/data/fashion_mnist.yaml": ["k of the paper: {DPSD[k]} (answers.k)."],
    "conf/data/imagenet.yaml": ["k of the paper: {DPSD[k_imagenet]} (answers.k)."],
    "conf/data/mnist.yaml": ["k of the paper: {DPSD[k]} (answers.k)."],
    "conf/data/pathmnist.yaml": ["k of the paper: {DPSD[k]} (answers.k)."],
    "conf/experiment/data_sensitive_readings.yaml": [
        "sigma * beta a sample is {DPSD[sigma]}; divided by the batch's {DPSD[b]} images",
    ],
    "conf/experiment/dense_published.yaml": [
        *DENSE_TRAINING,
        "teacher: cnn_bn teacher_width: {DENSE[width]} student: cnn_bn student_width: "
        "{DENSE[width]} generator_width: {DENSE[generator_width]}",
        'method: dense rounds: "{DENSE[rounds]}" queries_per_round: "{DENSE[images]}"',
    ],
    "conf/experiment/paper_dpsd.yaml": [
        "bound: {DPSD[beta]} # beta for an epsilon up to {DPSD[data_1_epsilon]}; {DPSD[beta_10]}",
        "k: {DPSD[k]} mask: signed # M_k",
        "epsilon_stated: {DPSD[data_1_epsilon]}.0 # Table I: {DPSD[data_1]} % on MNIST; "
        "{DPSD[data_10]} % under {DPSD[data_10_epsilon]}",
    ],
    "conf/experiment/paper_dpsd_label.yaml": [
        "epsilon_per_answer: {DPSD[label_1_epsilon]}.0",
        "epsilon_stated: {DPSD[label_1_epsilon]}.0 # Table IV: {DPSD[label_1]} % on MNIST",
    ],
    "conf/experiment/paper_fed_dpsd.yaml": [
        "num_clients: {DPSD[m]} # m",
        "rounds: {DPSD[T]} # T",
        "queries_per_round: {DPSD[b]} # b",
        "noise_multiplier: {DPSD[sigma]}.0 # sigma",
        "bound: {DPSD[beta_10]} # beta for an epsilon above {DPSD[data_1_epsilon]}",
        "epsilon_stated: {DPSD[federated_10_epsilon]}.0 # Table V: {DPSD[federated_10]} %",
    ],
    "conf/experiment/paper_fed_dpsd_label.yaml": [
        "num_clients: {DPSD[m]} # m",
        "rounds: {DPSD[T]} # T",
        "queries_per_round: {DPSD[b]} # b",
        "k: {DPSD[k]} epsilon_per_answer",
        "epsilon_per_answer: {DPSD[federated_10_epsilon]}.0",
        "epsilon_stated: {DPSD[federated_10_epsilon]}.0 # Table V: {DPSD[federated_10]} %",
    ],
    "conf/experiment/table1.yaml": [
        'answers.bound: "{DPSD[beta]}" answers.k: "{DPSD[k]}"',
        'as printed, 10: {{<<: *printed, answers.bound: "{DPSD[beta_10]}"',
    ],
    "conf/experiment/table6.yaml": [
        'answers.bound: "{DPSD[beta_10]}" answers.k: "{DPSD[k]}" answers.mask: signed rounds: '
        '"{DPSD[T]}" queries_per_round: "{DPSD[b]}"',
        'method.one_hot_weight: "{DPSD[weight]}" method.entropy_weight: "{DPSD[weight]}" '
        'method.activation_weight: "{DPSD[weight]}" gradients, without CE',
    ],
    "conf/experiment/table5.yaml": [
        "({DENSE[width]} there), the generator's width ({DENSE[generator_width]}), # epochs "
        "({DENSE[epochs]}) and rounds ({DENSE[rounds]})",
    ],
    "conf/experiment/table5_full.yaml": [
        *DENSE_TRAINING,
        "teacher_width: {DENSE[width]} student_width: {DENSE[width]} generator_width: "
        "{DENSE[generator_width]}",
        'DENSE: rounds: "{DENSE[rounds]}"',
    ],
    "conf/method/dense.yaml": [
        "generator_steps: {DENSE[T_G]} # T_G of the paper",
        "generator_learning_rate: {DENSE[generator_rate]}",
        "batch_norm_weight: {DENSE[weight]}.0 # lambda_1",
        "one_hot_weight: {DENSE[weight]}.0",
        "adversarial_weight: {DENSE[weight]}.0 # lambda_2 of the paper: {DENSE[lambda_2]} there, "
        "{DENSE[weight]} in its code base's command",
        "before an image is asked; {DENSE[shift]} in the code base",
    ],
    "conf/answers/noisy_max.yaml": [
        "teachers_per_client={DGD[teachers]}",
        "4.0 # {DGD[scale]} for the {DGD[teachers]} teachers of DGD",
    ],
    "conf/method/dgd.yaml": [
        "generator_steps: {DGD[generator_rounds]} # against the baseline",
        "generator_learning_rate: 0.002 # {DGD[generator_rate]} in the paper",
        "entropy_weight: {DGD[alpha]}.0 # alpha of Eq. 2",
        "activation_weight: {DGD[beta]} # beta of Eq. 2",
        "code_size: {DGD[c]} # c, length of the autoencoder's codes",
        "vae_steps: {DGD[rounds]}",
        "epsilon_1: null # {DGD[epsilon_1]} in the paper",
        "student_steps: {DGD[rounds]} # in each round",
        "learning_rate: {DGD[rate]} # of the autoencoder and the student",
        "batch_size: {DGD[b]}",
        "teachers_per_client: 25 # {DGD[teachers]} in the paper",
    ],
    "conf/method/dp_dfd.yaml": [
        "nearest to the paper's {DP-DFD[images]}.",
        "entropy_weight: {DP-DFD[alpha]}.0 # Eq. 2, second term; alpha",
        "activation_weight: {DP-DFD[beta]}.0 # Eq. 2, third term; beta",
    ],
    "conf/method/fed_dpsd.yaml": [
        "entropy_weight: {DGD[alpha]}.0 # Eq. 8, second term; this weight and the next are DGD's, "
        "the paper has {DPSD[weight]}",
        "activation_weight: {DGD[beta]} # Eq. 8, third term",
        "lambda of Eq. 2, {DPSD[lambda]} in the paper.",
        "gamma of Eq. 3; {DPSD[gamma_s]} in the paper",
    ],
    "conf/method/feddafl.yaml": [
        "student_learning_rate: {DAFL[lr_S]}",
        "one_hot_weight: {DAFL[oh]}.0",
        "entropy_weight: 2.17 # {DAFL[ie]} for logarithms to base 10",
        "activation_weight: {DAFL[a]}",
    ],
    "conf/method/paper_fed_dpsd.yaml": [
        "label_step: {DPSD[gamma_s]} # gamma_s",
        "student_learning_rate: {DPSD[gamma_s]} # gamma_s",
        "generator_learning_rate: {DPSD[gamma_g]} # gamma_g",
        "balance: {DPSD[lambda]}.0 # lambda",
        "one_hot_weight: {DPSD[weight]}.0 # Eq. 8, first term",
        "entropy_weight: {DPSD[weight]}.0 # Eq. 8, second term",
        "activation_weight: {DPSD[weight]}.0 # Eq. 8, third term",
    ],
    "docs/extending.md": [
        "`answers.k={DPSD[k_cifar100]}`, for example",
        "| `mnist` | `ylecun/mnist` | 1x28x28 | 10 | {DPSD[k]} |",
        "| `fashion_mnist` | `zalando-datasets/fashion_mnist` | 1x28x28 | 10 | {DPSD[k]} |",
        "| `cifar10` | `uoft-cs/cifar10` | 3x32x32 | 10 | {DPSD[k]} |",
        "| `cifar100` | `uoft-cs/cifar100` | 3x32x32 | 100 | {DPSD[k_cifar100]} |",
        "| `pathmnist` | own files | 3x28x28 | 9 | {DPSD[k]} |",
        "| `celeba_hair` | `flwrlabs/celeba` | 3x64x64 | 3 | {DPSD[k]} |",
        "| `celeba_gender` | `flwrlabs/celeba` | 3x64x64 | 2 | {DPSD[k_celeba_gender]} |",
        "| `covidx` | own files | 1x64x64 | 3 | {DPSD[k]} |",
        "| `imagenet` | own files | 3x224x224 | 1,000 | {DPSD[k_imagenet]} |",
    ],
    "docs/paper_map.md": [
        "under a stated epsilon of {DPSD[federated_10_epsilon]} with five clients and of "
        "{DPSD[data_1_epsilon]} with one",
        "in 20 rounds where the paper has {DPSD[T]};",
        "by Adam at 0.005 on one cycle (the paper: {DPSD[gamma_s]})",
        "lambda is 0 by default (the paper: {DPSD[lambda]})",
        "all ten classes by default (the paper: k = {DPSD[k]} in Eq. 3; Alg. 2 masks no gradients)",
        "gamma is 1 (the paper: {DPSD[gamma_s]})",
        "which is Eq. 4 (the paper: k = {DPSD[k]})",
        "weight {DGD[alpha]} as in DGD (the paper: {DPSD[weight]})",
        "weight {DGD[beta]} as in DGD, whose norm is L1 (the paper: {DPSD[weight]}, L2)",
        "The paper's threshold is {DP-DFD[threshold]}, 0.05 for ten classes",
        "and activation; the paper prints alpha = {DP-DFD[alpha]} and beta = {DP-DFD[beta]}",
        "nearest to the {DP-DFD[images]} images with which the paper's MNIST converges",
        "{DGD[generator_rounds]} steps at a rate of 0.002, where the paper has "
        "{DGD[generator_rounds]} rounds from {DGD[generator_rate]} down",
        "answers.noise_at=server teachers_per_client={DPDFD[n]}",
        "weights of its code base: {DENSE[weight]}, {DENSE[weight]}, {DENSE[weight]}",
    ],
    "docs/privacy.md": [
        "It gives 0.0456 at sigma = {DPSD[sigma]}, beta = {DPSD[beta]}, N = 51,200",
        "over a batch of {DPSD[b]} it proves 1.061",
        "| gradients, sigma {DPSD[sigma]}, beta {DPSD[beta]}, 51,200 queries |",
        "| gradients, sigma {DPSD[sigma]}, beta {DPSD[beta_10]}, 51,200 queries |",
        "sigma {DPSD[sigma]}, beta {DPSD[beta]}, {DPSD[T]} batches of {DPSD[b]}, each normalised",
        "| labels, eps0 {DPSD[label_10_epsilon]}, k {DPSD[k]}, 51,200 queries |",
        "| labels, eps0 {DPSD[label_1_epsilon]}, k {DPSD[k]}, 51,200 queries |",
        "sigma {DPDFD[sigma]}, b {DPDFD[B]} (its Theorem 3; it states no T, {DPSD[T]} is DPSD's)",
        "| DGD's labels, eps0 {DGD[epsilon_0]}, {DGD[queries]} queries |",
    ],
    "docs/results.md": [
        "(97.8 ± 0.4 %, published {DPSD[label_10]} %)",
        "(9.6 ± 0.7 %, published {DPSD[data_1]} %)",
        "(one seed, published {DENSE[dense]} %)",
        "(published {DGD[dgd_1]} and {DGD[dgd_10]} %)",
        "LP-2ST 94.6 ± 0.1 % (published {LP-MST[mnist_1]} %)",
    ],
    "docs/results/data_sensitive.md": [
        "has both its accuracy ({DPSD[data_1]} %, published) and its stated epsilon "
        "({DPSD[data_1_epsilon]})",
        "divided by the batch's {DPSD[b]} images",
    ],
    "docs/results/dgd.md": [
        "The paper has {DGD[dgd_10]} % and {DGD[dgd_1]} % (published, MNIST, under a stated "
        "epsilon of {DGD[dgd_10_epsilon]} and {DGD[dgd_1_epsilon]})",
        "What do DGD's {DGD[queries_1]} and {DGD[queries_10]} queries teach",
        "Laplace of scale {DGD[scale]}, or Gaussian",
        "There are {DGD[teachers]} teachers",
        "with its epsilon_1 of {DGD[epsilon_1]}",
    ],
    "docs/results/dpdfd.md": [
        "{DPDFD[one_1]} % with one teacher and {DPDFD[many_1]} % with a hundred (published, MNIST, "
        "under a stated epsilon of 1; {DPDFD[many_10]} % under 10)",
        "the paper's have {DPDFD[teacher]}",
        "sigma {DPDFD[sigma]}, batches of {DPDFD[B]}",
    ],
    "docs/results/fig6.md": [
        "lambda {DPSD[lambda]} (the paper's) | 66.2",
        "lambda {DPSD[lambda]} (the paper's) | 92.5",
        "sigma {DPSD[sigma]}, 12,800 answers",
    ],
    "docs/results/table6.md": [
        "sigma {DPSD[sigma]}, labels of one",
        "all weights {DPSD[weight]} (the paper prints none)",
        "11.652 | {DPSD[Table_VI_all_mnist_gradients]} |",
        "11.652 | {DPSD[Table_VI_without_CE_mnist_gradients]} |",
        "11.652 | {DPSD[Table_VI_without_IE_mnist_gradients]} |",
        "11.652 | {DPSD[Table_VI_without_NORM_mnist_gradients]} |",
        "128,001 | {DPSD[Table_VI_all_mnist_labels]} |",
        "128,001 | {DPSD[Table_VI_without_CE_mnist_labels]} |",
        "128,001 | {DPSD[Table_VI_without_IE_mnist_labels]} |",
        "128,001 | {DPSD[Table_VI_without_NORM_mnist_labels]} |",
    ],
    "docs/results/dense.md": [
        "where the paper has {DENSE[dense]} %",
        "DENSE's networks (width {DENSE[width]}, generator {DENSE[generator_width]}), "
        "{DENSE[epochs]} epochs a teacher, {DENSE[rounds]} rounds of DENSE",
        "| FedAVG once, unweighted | {DENSE[fedavg]} | 87.8 |",
        "| DENSE | {DENSE[dense]} | 89.6 |",
        "Why not {DENSE[fedavg]} and {DENSE[dense]}?",
    ],
    "docs/results/label_dp.md": [
        "LP-2ST 94.6 ± 0.1 % (published {LP-MST[mnist_1]} %)",
        "| LP-2ST, Algorithm 3 as printed | 90.4 ± 0.8 | 1, delta 0, trust nobody | inf | "
        "{LP-MST[mnist_1]} |",
        "on CIFAR-10 ({LP-MST[cifar10_1]} and {LP-MST[cifar10_2]} %) and on CIFAR-100 "
        "({LP-MST[cifar100_3]} %)",
        "*DPSD's own label row* ({DPSD[label_1]} %, published)",
    ],
    "docs/results/methods.md": [
        "networks of width 8 instead of {DENSE[width]}, generators of width 8 instead of "
        "{DENSE[generator_width]}, 10 epochs instead of {DENSE[epochs]}, and 20 to 40 rounds "
        "instead of {DENSE[rounds]}",
    ],
    "docs/results/direct.md": [
        "(`training=output_gradient`) | 5.9 ± 3.7 | inf | inf | {DPDFD[Table_4_MNIST_0_5_DPDFD]} | "
        "{DPDFD[Table_4_MNIST_1_0_DPDFD]} |",
        "gradient for each record | 5.7 ± 3.1 | inf | inf | {DPDFD[Table_4_MNIST_0_5_DPDFD]} | "
        "{DPDFD[Table_4_MNIST_1_0_DPDFD]} |",
        "| 96.3 ± 0.1 | 0.496 | 0.985 | {DPDFD[Table_4_MNIST_0_5_DPSGD]} | "
        "{DPDFD[Table_4_MNIST_1_0_DPSGD]} |",
    ],
    "docs/results/one_place.md": [
        "DPSD's Table III has {DPSD[gm_dp_1]} % for GM-DP and {DPSD[tsadp_1]} % for TSADP "
        "(published, under a stated epsilon of 1)",
        "| 98.1 ± 0.0 | 0.993 | 2.139 | {DPSD[gm_dp_1]} |",
        "| 97.2 ± 0.1 | 0.993 | 1.787 | {DPSD[tsadp_1]} |",
    ],
    ONE_TEACHER: [
        "where the paper has {DPSD[label_10]} %",
        "(57.6 ± 5.5 %, published {DPSD[label_1]} %;",
        "(9.6 ± 0.7 %, published {DPSD[data_1]} %)",
        "| label | {DPSD[label_1]} | 57.6 ± 5.5 | {DPSD[label_1_epsilon]} |",
        "| label | {DPSD[label_10]} | 97.8 ± 0.4 | {DPSD[label_10_epsilon]} |",
        "| gradient, sigma {DPSD[sigma]}, beta {DPSD[beta]} | {DPSD[data_1]} | 9.6 ± 0.7 | "
        "{DPSD[data_1_epsilon]} |",
        "| gradient, sigma {DPSD[sigma]}, beta {DPSD[beta_10]} | {DPSD[data_10]} | the same: beta "
        "cancels | {DPSD[data_10_epsilon]} |",
        "ResNet-34 ({DPSD[teacher]} %)",
        "the paper has {DPSD[T]} of {DPSD[b]}.",
        "over a batch of {DPSD[b]} it proves 1.061",
    ],
    "docs/results/tried.md": [
        "normalised gradient at lambda = {DPSD[lambda]} points",
        "loop with sigma 0, k = {DPSD[k]}, a norm a sample, batches of {DPSD[b]}:",
        "student's Adam at gamma_s = {DPSD[gamma_s]} (print)",
        "generator as printed: weights {DPSD[weight]}, {DPSD[weight]}, {DPSD[weight]}, Adam at "
        "gamma_g = {DPSD[gamma_g]}",
    ],
    "docs/results/xray.md": [
        "| MedMNIST's ResNet-18, all data in one place | {MedMNIST[accuracy]} | "
        "{MedMNIST[auroc]} |",
    ],
    "fed_dpsd/losses.py": [
        "student: torch.Tensor, balance: float = {DPSD[lambda]}.0",
        "student: NDArray[np.floating], balance: float = {DPSD[lambda]}.0",
        "{DPSD[gamma_s]} * {DPSD[beta]} for an epsilon up to {DPSD[data_1_epsilon]}.",
    ],
    "fed_dpsd/models/classifiers.py": [
        "width {DENSE[width]} is DENSE's MNIST network",
        "of arXiv 2007.14191, which has width {TSADP[width]}.",
        "scale: float = {TSADP[s]}.0, inverse_temperature: float = {TSADP[T]}.0, offset: float = "
        "{TSADP[o]}.0",
        "DataLens' evaluation, which has width {DataLens[width]};",
    ],
    "fed_dpsd/privacy/published.py": ["its total adds epsilon_1 = {DGD[epsilon_1]} "],
}
PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/**/*.md")))]
FILES = PAGES + [
    str(path.relative_to(ROOT))
    for pattern in ("conf/**/*.yaml", "fed_dpsd/**/*.py")
    for path in sorted(ROOT.glob(pattern))
]
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
PHRASES = re.compile(
    rf"published ({NUMBER}) %|the paper has ({NUMBER})|[Tt]he paper: (?:k = )?({NUMBER})"
    rf"|({NUMBER}) in (?:the paper|the code base|its code base)\b"
)
CELLS = re.compile(r"(?<!\\)\|")
# No paper states the length of z, or how images are made of it; and one teacher is one client.
OURS = {"latent_size: 64", "contrast: 4.0", "brightness: -2.0", "num_clients: 1"}


def read(file):
    """A file's text, with one space for each line break or run of spaces."""
    return " ".join((ROOT / file).read_text().split())


def quoted_in(file):
    """The numbers that a file is known to quote."""
    names = re.findall(r"\{([\w-]+)\[(\w+)\]\}", " ".join(QUOTATIONS.get(file, ())))
    return {PAPERS[paper][name] for paper, name in names}


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


@pytest.mark.parametrize(
    ("file", "text"), [(file, text) for file, texts in QUOTATIONS.items() for text in texts]
)
def test_a_quotation_is_as_printed(file, text):
    quotation = re.escape(text.format(**PAPERS))
    assert len(re.findall(rf"(?<![\w.]){quotation}(?!\.?\w)", read(file))) == 1


def test_every_number_is_quoted_or_a_point_of_the_figure():
    points = {(point.method, point.accuracy) for point in published("mnist")}
    for paper, numbers in read_papers().items():
        for name, number in numbers.items():
            quoted = f"{{{paper}[{name}]}}" in str(QUOTATIONS)
            assert quoted or (number["of"], float(number["printed"])) in points, (paper, name)


def test_tables_hold_no_other_published_number():
    """Those of docs/papers.md are compared by tests/test_papers.py."""
    found = {file: set(published_in_tables(file)) for file in PAGES if file != "docs/papers.md"}
    assert found[ONE_TEACHER]
    assert {file: extra for file in found if (extra := found[file] - quoted_in(file))} == {}


def test_no_other_number_is_called_the_papers():
    said = {file: {n for ns in PHRASES.findall(read(file)) for n in ns if n} for file in FILES}
    assert said[ONE_TEACHER]
    assert {file: extra for file in FILES if (extra := said[file] - quoted_in(file))} == {}


@pytest.mark.parametrize("file", [file for file in FILES if "/paper_" in file and "conf" in file])
def test_a_papers_loop_has_no_other_settings(file):
    settings = re.findall(r"^ *(\w+: [\d.-]+)", (ROOT / file).read_text(), re.MULTILINE)
    quoted = re.findall(r"\w+: [\d.-]+", " ".join(QUOTATIONS.get(file, ())).format(**PAPERS))
    assert set(settings) <= {*quoted, *OURS}
