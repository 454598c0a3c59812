"""The student of a completed run, with facts about the run."""

import numpy as np

from fed_dpsd import __version__
from fed_dpsd.errors import Diverged, UserError
from fed_dpsd.methods.method import tensors_of
from fed_dpsd.models import digest_of, weights_mismatch
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.server.cards import privacy_card_of
from fed_dpsd.server.run_folder import CompletedRun
from fed_dpsd.server.student import Network, Student, check_predictions, constants_of
from fed_dpsd.server.summary import result_line

ALL_TEACHERS = "its result is the ensemble of all teachers; export a run of another method"


def student_of(run: CompletedRun) -> Student[Classifier]:
    """Return the student of a completed run, from its last checkpoint."""
    config, summary = run.experiment.config, run.summary
    arch, width = config.model.student, config.model.student_width
    weights = tensors_of("student", run.state.tensors)
    # An ensemble of one teacher is that teacher.
    if alone := tensors_of("teachers.0", weights):
        weights = alone if len(alone) == len(weights) else {}
    if run.experiment.method.averages or alone:  # they have the teachers' architecture
        arch, width = config.architecture(0), config.model.teacher_width
    network = Network(arch, width, config.data.shape, config.data.num_classes)
    model = network.build(config.model)
    if reason := weights_mismatch(model, weights):
        reason = ALL_TEACHERS if alone else reason if weights else "it trains none"
        raise UserError(
            f"{run.folder}: method {summary['method']} has no student of its own: {reason}"
        )
    model.load_state_dict(weights)
    card = privacy_card_of(run)
    digest = digest_of(weights)  # as in the summary, unless a prefix was removed
    card["run"]["student_sha256"] = digest
    check = check_predictions(model, network)
    if not np.isfinite(check).all():
        raise Diverged(f"the student of {run.folder} predicts NaN or infinity", {})
    facts = {
        "version": __version__,
        "network": vars(network),
        "result": result_line(run.experiment, summary),
        "classes": config.data.class_names,
        **{key: getattr(config.data, key) for key in ("fit", "pixel_bits", "window")},
        "check": check.tolist(),
        **{key: summary[key] for key in ("method", "data")},
        "student_sha256": digest,
        "constants_sha256": digest_of(constants_of(model)),
        "privacy": card.pop("privacy"),
        "card": card,
    }
    return Student(network, model, facts)
