"""Readable numbers: percentages with intervals, seconds."""

import math

from scipy.stats import binomtest

Z = 1.959964  # half width of a 95 % interval, in standard deviations


def percent(fraction: float | None, digits: int = 1) -> str:
    """Return a fraction in percent; "unknown" for None."""
    return "unknown" if fraction is None else f"{100 * fraction:.{digits}f} %"


def percent_at_most(fraction: float) -> str:
    """Return an upper bound in percent, rounded up to a tenth."""
    return percent(min(math.ceil(1000 * fraction - 1e-9) / 1000, 1.0))


def wilson(right: int, total: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a fraction; (0, 1) for 0 of 0."""
    return tuple(binomtest(right, total).proportion_ci(method="wilson")) if total else (0.0, 1.0)


def with_interval(right: int, total: int) -> str:
    """Return a fraction in percent with its interval: "93.6 % (90.6 to 95.7)"; "-" for 0 of 0."""
    return percents((right / total, *wilson(right, total))) if total else "-"


def percents(interval: tuple[float, float, float]) -> str:
    """Return a fraction with the ends of its interval in percent: "93.6 % (90.6 to 95.7)"."""
    value, low, high = interval
    return f"{percent(value)} ({100 * low:.1f} to {100 * high:.1f})"


def score(interval: tuple[float, float, float]) -> str:
    """Return a score with the ends of its interval: "0.974 (0.962 to 0.983)"."""
    return "{:.3f} ({:.3f} to {:.3f})".format(*interval)


def spread(mean: float, deviation: float, unknown: str = "-") -> str:
    """Return "63.3 ± 1.5", only the mean if there is no deviation, or `unknown` for NaN."""
    if math.isnan(mean):
        return unknown
    return f"{mean:.1f}" if math.isnan(deviation) else f"{mean:.1f} ± {deviation:.1f}"


def compact(value: float) -> str:
    """Return a number in few characters, such as "0.25", "1,000", "2e6" or "inf"."""
    if math.isinf(value):
        return "inf"
    return f"{value:,.10g}" if abs(value) < 1e6 else f"{value:.3g}".replace("e+0", "e")


def duration(seconds: float) -> str:
    """Return a duration as text, such as "12.3 s", "5 min 20 s" or "2 h 5 min"."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 90:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
