"""What methods do not support: an error before data are read, with key, value and remedy."""

import pytest

from tests.methods.test_central import COUNTS, LABEL_PRIVATE
from tests.running import not_refused

WEIGHT = r"method.proximal_weight=.* must be (>= 0|a finite number)"
LEAST_SQUARES = "final_fit=least_squares needs .* or method.final_fit=steps"
ODDS = r"method.pooling=odds needs .*; use method.pooling=mean"
READ_LABELS = (
    ("method=central federation=deployment", "but a hospital's images are not; use"),
    ("method=fedavg teacher.same_start=true", "method=fedavg may read them; use"),
    ("method=fed_dpsd", "method=fed_dpsd may read them; use method=central"),
    ("method=ensemble num_clients=2", "method=ensemble may read them; use method=central"),
    ("method=central privacy.target_epsilon=1", "set training.epsilon instead"),
    ("method=central teachers_per_client=2", "numbers, which may depend on labels that"),
    ("method=central data.records_per_patient=3", "makes up patients from labels, which"),
    ("method=central partition=class", "divides records by their labels, which training="),
    (f"method=central partition=counts {COUNTS}", "divides records by their labels, which"),
    ("method=central teacher.path=t.safetensors teacher.arch=cnn", "use teacher.path=null"),
)
REFUSED = {  # what is typed first, and more settings with the error of each
    "method=fedprox training=plain answers=probabilities teacher.same_start=true": [
        (f"method.proximal_weight={weight}", WEIGHT) for weight in ("-1.0", "inf", "nan")
    ],
    "method=dpsd": (
        ("num_clients=2", "num_clients=2: method=dpsd has one client; use num_clients=1"),
        ("method.discriminator=both", "discriminator=both must be student or teacher"),
        ("method.discriminator=teacher method.generator_steps=0", "generator_steps >= 1"),
    ),
    **dict.fromkeys(LABEL_PRIVATE, READ_LABELS),
    "method=central training=plain answers=probabilities": (
        ("num_clients=2", "method=central has one client; use num_clients=1"),
    ),
    "method=direct model.student=cnn": (
        ("num_clients=2", "method=direct has one client; use num_clients=1"),
        ("model.teacher=mlp", "model.teacher=mlp: method=direct needs .*; use model.teacher=cnn"),
        ("model.teachers=[mlp]", r"method=direct needs .*; use model.teachers=\[\]"),
        ("teacher.path=t teacher.arch=cnn", "method=direct needs .*; use teacher.arch=null"),
    ),
    "method.final_fit=least_squares training=plain": (
        ("answers=label model=patches", LEAST_SQUARES),
        ("answers=probabilities", LEAST_SQUARES),
    ),
    "method.pooling=odds": (
        ("training=plain answers=label", ODDS),
        ("answers=probabilities method.class_counts=false", ODDS),
        ("training=dp_sgd answers=probabilities training.count_fraction=null", ODDS),
    ),
    "method=dp_fedsgd answers=clipped_gradients model=scattering diagnostics=false": (
        ("training=dp_sgd", "training=dp_sgd: method=dp_fedsgd does not support it; use"),
        ("answers=gradient", "answers=gradient: method=dp_fedsgd needs sums over records; use"),
        ("model=cnn", "model.teacher=cnn: .* a linear classifier on fixed features; use model="),
        ("teachers_per_client=2", "teachers_per_client=2: .* use teachers_per_client=1"),
        ("diagnostics=true", "diagnostics=true: method=dp_fedsgd has no teachers to score; use"),
        ("clients_per_round=1", "clients_per_round=1: .* use clients_per_round=null"),
        ("method.learning_rate=0", "method.learning_rate=0 must be > 0"),
        ("answers.noise_at=server", "noise_at=server: no server may see these sums; use"),
        ("answers.noise_at=distributed", "noise_at=distributed needs a quorum"),
        (
            "num_clients=5 answers.noise_at=distributed answers.quorum={threshold:3,colluding:1}",
            "threshold=3 must be above half the sum of num_cli",
        ),
        ("answers.noise_multiplier=0", "noise_multiplier=0.0 must be > 0 and at most"),
        ("answers.noise_multiplier=1e-200", "noise_multiplier=1e-200 must be between 1e-100 and"),
        ("training.unit=record", r"belongs to training=.*; did you mean answers.unit\?"),
        ("answers.unit=patient", "answers.unit=patient: .* give data.patient_column"),
        ("answers.records_per_patient=2", "records_per_patient=2 needs unit=patient"),
        ("method=fed_dpsd", "answers=clipped_gradients releases sums .*; use method=dp_fedsgd"),
    ),
}


@pytest.mark.parametrize("first", REFUSED)
def test_what_does_not_fit_is_refused(small, first):
    assert not not_refused(small, REFUSED[first], *first.split())


def test_pooled_odds_of_probabilities_are_accepted(small):
    """The control: what the errors of `method.pooling=odds` ask for is accepted."""
    assert small("method.pooling=odds", "training=plain", "answers=probabilities").method.pooling
