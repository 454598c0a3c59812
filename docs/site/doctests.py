"""Examples in docstrings, as code: Markdown takes `>>>` for a quotation."""

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^ *>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


class Doctests(Extension):
    """Fences the examples of every docstring."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Fence the doctests of one object."""
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
