"""DGD+: DGD whose votes have Gaussian noise; Ge et al., IEEE TIP 32 (2023), Sec. IV-B."""

from fed_dpsd.papers.dgd import DGD


class DGDPlus(DGD):
    """DGD; conf/method/dgd_plus.yaml chooses the noise."""
