"""DPSD as printed: the paper's own loop with one teacher, line by line.

Liu, Ge, Wang, Li, Liu: "Privacy-Preserving Model Transcription with Differentially Private
Synthetic Distillation", arXiv 2601.19090, Algorithm 1 (Sec. III-B).
"""

from typing import ClassVar

from fed_dpsd.papers.paper_fed_dpsd import PaperFedDPSD


class PaperDPSD(PaperFedDPSD):
    """DPSD, Algorithm 1, as printed; conf/method/paper_dpsd.yaml sets its readings.

    Its lines 3 to 6 are lines 4 to 18 of Algorithm 2, whose loop it shares, with one teacher in the
    place of the clients. With `latents` kept they are drawn once, in line 1, and trained in line 6.
    """

    num_clients: ClassVar[int | None] = 1
