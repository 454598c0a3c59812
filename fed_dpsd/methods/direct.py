"""Direct training: the papers' network that learns from private records itself, without a teacher.

It is the student's own network, on all records in one place. DPDFD's way of it (Liu et al., IJCAI
2023, Algorithm 3) is training=output_gradient.
"""

from fed_dpsd.methods.central import Central


class Direct(Central):
    """Central training of the student's architecture; conf/method/direct.yaml sets that."""
