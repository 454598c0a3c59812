"""Training that protects only labels; everything else in the records is treated as public.

Label differential privacy compares data sets that differ in the label of one record. For records,
patients and clients, such training counts as plain: nothing is proven.
"""

from abc import abstractmethod
from typing import Any, ClassVar, Literal

from dp_accounting import DpEvent

from fed_dpsd.privacy.accounting import pure_bound
from fed_dpsd.privacy.epsilon import Epsilon, add_review_note
from fed_dpsd.privacy.training import Training, teacher_file_problems

IMAGES_NOTE = "the images are not protected"


class LabelPrivate(Training):
    """Training on public images that reads the labels of a shard only through a mechanism.

    Guarantee: `event`, for one replaced label, with the images and all other labels unchanged. A
    record's number may depend on its label, for example if each class has a folder, so training
    draws its own random order of records. Nothing is proven beyond a label, and no ledger records
    this training, which is for simulations with one teacher. Each label could be randomised at its
    source, so nobody else must be trusted.
    """

    reads: ClassVar[Literal["labels"]] = "labels"
    reason: ClassVar[str] = "the training protects labels alone"
    epsilon: float

    def check(self, config: Any, method: Any, partition: Any) -> list[str]:
        """Return the problems with training that protects only labels."""
        problems, named = teacher_file_problems(self.name, config), f"training={self.name}"
        if not config.federation.simulation:
            problems.append(
                f"{named} treats images as public, but a hospital's images are not; use "
                "training=dp_sgd, or federation=simulation"
            )
        if config.data.records_per_patient is not None:
            problems.append(
                f"data.records_per_patient={config.data.records_per_patient} makes up patients "
                f"from labels, which {named} keeps private; use null"
            )
        if config.teachers_per_client > 1:
            problems.append(
                f"teachers_per_client={config.teachers_per_client} divides records by their "
                f"numbers, which may depend on labels that {named} keeps private; use "
                "teachers_per_client=1"
            )
        if partition.name == "class" or partition.leaves_out_by == "labels":
            problems.append(
                f"partition={partition.name} divides records by their labels, which {named} keeps "
                "private; use partition=iid"
            )
        if not (method.uses_teachers_alone and config.num_clients == 1):
            problems.append(
                f"{named} requires that nothing else reads the labels, but method={method.name} "
                "may read them; use method=central"
            )
        if (target := config.privacy.target_epsilon) is not None:
            problems.append(
                f"privacy.target_epsilon={target:g} is the epsilon of a whole record, but "
                f"{named} protects only its label; set training.epsilon instead"
            )
        return problems

    def describe(self, trainings: int = 1) -> str:
        """Describe how teachers are trained and what this protects by itself."""
        return f"only labels are private ({self.name}, training.epsilon={self.epsilon:g})"

    @abstractmethod
    def event(self) -> DpEvent:
        """Return the event of all training, for one replaced label; its bound must be pure."""


def prove_label(training: LabelPrivate, notes: tuple[str, ...], queries: int) -> Epsilon:
    """Prove the epsilon of a label, for any number and kind of the teachers' releases."""
    bound = pure_bound(training.event())
    return Epsilon(
        *(bound.epsilon, bound.delta, "label", "replace_one", "nobody", bound.accountant),
        *(queries, add_review_note((IMAGES_NOTE, *notes), training)),
    )
