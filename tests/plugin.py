"""The plug-in of docs/extending.md, as a package on the path."""

import contextlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"^`(\S+)`\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
PACKAGE = "fed_dpsd_example"


def write(folder):
    """Write the package's files, as they are to be installed."""
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


@contextlib.contextmanager
def installed(folder):
    """Let this process import from a folder; undo it in the end."""
    from fed_dpsd.client import terms
    from fed_dpsd.config import compose, plugins
    from fed_dpsd.models.classifiers import CLASSIFIERS

    known = set(CLASSIFIERS)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for module in [each for each in sys.modules if each.partition(".")[0] == PACKAGE]:
            del sys.modules[module]
        for network in set(CLASSIFIERS) - known:
            del CLASSIFIERS[network]
        plugins.code_digest.cache_clear()
        terms.choices.cache_clear()
        compose.method_values.cache_clear()
