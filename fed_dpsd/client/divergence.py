"""Teachers whose training diverges: an error in a simulation, a line of the log at a hospital."""

import logging
from collections.abc import Sequence
from typing import Literal

import torch

from fed_dpsd.config import Config
from fed_dpsd.errors import Diverged
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.divergence import check_losses, is_finite
from fed_dpsd.privacy.training import CustomTraining, Training, TrainingMechanism

Role = Literal["teacher", "baseline"]
logger = logging.getLogger("fed_dpsd")


class Watch:
    """A watch over the trainings of a client's teachers.

    At a hospital a line of its own log says that a training diverged, and nothing else happens: an
    error would be a fact about records that no noise covers (docs/privacy.md, "Sharp edges").

    Args:
        config: the site's configuration.
        training: how the teachers are trained.
        client: the client's number.
        role: what they are; the training of a "baseline" has keys in the method's.

    Attributes:
        diverged: the trainings that diverged at a hospital, for its own eyes.
    """

    def __init__(self, config: Config, training: Training, client: int, role: Role) -> None:
        self._config, self._client, self._role = config, client, role
        self.diverged: list[Diverged] = []
        group, rate = "teacher", config.teacher.learning_rate
        if isinstance(training, TrainingMechanism | CustomTraining):
            group = "training" if role == "teacher" else "method.baseline"
            rate = getattr(training, "learning_rate", None)  # a plug-in's may have none
        self._rates = {} if rate is None else {f"{group}.learning_rate": rate}
        if pull := config.method.get("proximal_weight"):
            self._rates["method.proximal_weight"] = pull

    def check_losses(self, losses: Sequence[torch.Tensor], shard: int) -> None:
        """Check the losses of a plain training, exact functions of records, in a simulation alone.

        Raises:
            Diverged: in a simulation, a loss is NaN or infinite.
        """
        if self._config.federation.simulation:
            check_losses(losses, self._named(shard), self._rates)

    def check(self, teacher: Classifier, shard: int) -> None:
        """Check a trained teacher by its weights alone, whatever it was trained by.

        Raises:
            Diverged: in a simulation, weights or predictions are not finite.
        """
        if is_finite(teacher, self._config.data.shape):
            return
        named = self._named(shard)
        error = Diverged(f"weights or predictions of {named} are NaN or infinite", self._rates)
        if self._config.federation.simulation:
            raise error
        self.diverged.append(error)
        logger.error("%s; until then it answers as a teacher without records does", error)

    def _named(self, shard: int) -> str:
        number = f" {shard}" if self._config.teachers_per_client > 1 else ""
        return f"client {self._client}'s {self._role}{number}"
