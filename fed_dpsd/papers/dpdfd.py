"""DPDFD as printed: data-free distillation from one teacher, or from several in one place.

Liu, Wang, Li, Zeng, Ge: "Model Conversion via Differentially Private Data-Free Distillation",
IJCAI 2023, Algorithms 1 and 2.
"""

from typing import ClassVar

from fed_dpsd.papers.paper_fed_dpsd import PaperFedDPSD


class DPDFD(PaperFedDPSD):
    """DPDFD, Algorithms 1 and 2; conf/method/dpdfd.yaml sets its readings.

    The lines of the loop (fed_dpsd/papers/paper_fed_dpsd.py) are these:

    | step | Algorithm 1 |
    | --- | --- |
    | new latent vectors, images | lines 2 and 3 |
    | the teacher's gradients, normalised and noisy | lines 4 to 9, `answers=gradient_sum` |
    | labels, and a step of the student | lines 10 to 12 |
    | a step of the generator on L_S + L_G (Eq. 5) | lines 13 and 14 |

    Algorithm 2 has `teachers_per_client` teachers, `answers=gradient` with noise once an image at a
    trusted aggregator (`answers.noise_at=server`), and `method.mean_over=clients`.
    """

    num_clients: ClassVar[int | None] = 1
