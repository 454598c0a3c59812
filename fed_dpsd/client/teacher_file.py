"""Pretrained teachers, read from files."""

from pathlib import Path

from fed_dpsd.config import Config
from fed_dpsd.errors import UserError
from fed_dpsd.models import read_facts, read_weights, weights_mismatch
from fed_dpsd.models.classifiers import Classifier
from fed_dpsd.models.torchvision_networks import Adapted, rename_weights

PIXELS = "backbone.mean", "backbone.std"  # not in the state dict of torchvision's own networks


def read_teacher(teacher: Classifier, config: Config, client: int) -> Classifier:
    """Load the weights in teacher.path into a teacher, and return it.

    {client} in the path stands for the client's number. A torchvision network's state dict is read
    unchanged; the file's metadata state how pixels were normalised.

    Raises:
        UserError: the file is missing, is not a safetensors file, or contains another architecture.
    """
    path = str(config.teacher.path).replace("{client}", str(client))
    try:
        found = read_weights(Path(path))
        weights = rename_weights(config.architecture(client), found)
        if weights.keys() != found.keys():
            weights |= {name: t for name, t in teacher.state_dict().items() if name in PIXELS}
        problem = weights_mismatch(teacher, weights)
    except ValueError as error:
        raise UserError(f"teacher.path={error}") from None
    if problem:
        raise UserError(
            f"teacher.path={path} does not fit teacher.arch={config.architecture(client)} "
            f"(model.teacher_width={config.model.teacher_width}, data {config.data.name}): "
            f"{problem}; give the architecture and width that it was trained with"
        )
    teacher.load_state_dict(weights)
    if isinstance(teacher.backbone, Adapted) and weights.keys() != found.keys():
        try:
            teacher.backbone.normalise(read_facts(Path(path)))
        except ValueError as error:
            raise UserError(f"teacher.path={path}: {error}") from None
    return teacher
