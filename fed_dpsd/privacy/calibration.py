"""Calibration of noise to a given epsilon."""

import math
from collections.abc import Callable

from scipy.optimize import brentq


def calibrate(
    spend: Callable[[float], float], target: float, private: float, open_end: float
) -> float:
    """Find the parameter at which `spend` comes closest to `target` without exceeding it.

    Args:
        spend: epsilon as a function of the parameter; monotone between the ends.
        target: epsilon to spend, > 0.
        private: the end that spends least, > 0: large noise or a small epsilon.
        open_end: the end that spends most, > 0.

    Raises:
        ValueError: the target is smaller, or larger, than both ends' epsilons.
    """
    ends = math.log(private), math.log(open_end)
    stride = math.copysign(1.0, ends[1] - ends[0])

    def excess(log_value: float) -> float:
        value = open_end if log_value == ends[1] else math.exp(log_value)
        return spend(value) / target - 1

    # Step from the private end until the target is passed; settings far beyond it are never tried.
    near = far = ends[0]
    while excess(far) < 0:
        if far == ends[1]:
            raise ValueError(
                f"target_epsilon={target:.12g} is more than any setting here spends; use "
                f"{spend(open_end):.6g} or less"
            )
        near, far = far, far + stride
        if (far - ends[1]) * stride > 0:
            far = ends[1]
    if far == ends[0]:
        least = spend(private)
        if math.isinf(least):
            raise ValueError(
                f"target_epsilon={target:.12g}: nothing finite is proven for this method and "
                "training; leave it out, or use training=dp_sgd"
            )
        raise ValueError(
            f"target_epsilon={target:.12g} is less than any setting here spends; use "
            f"{least:.4g} or more"
        )
    root = float(brentq(excess, near, far, xtol=1e-5))
    while excess(root) > 0:
        root -= math.copysign(1e-5, stride)
    return math.exp(root)
