"""The commands and the Python code in README.md and docs/."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TYPED = re.compile(r"^(?:    )?((?:fed-dpsd|flwr) .*)$", re.MULTILINE)
_CODE = re.compile(r"# exit code (\d)")


@dataclass(frozen=True)
class Command:
    """A command line of a page.

    Args:
        line: the line, with its comment.
    """

    line: str

    @property
    def words(self):
        return shlex.split(self.line, comments=True)

    @property
    def code(self):
        """The exit code that the comment promises."""
        found = _CODE.search(self.line)
        return int(found[1]) if found else 0

    @property
    def said_not_to_run(self):
        return "not run" in self.line.partition("#")[2]


def text_of(name):
    return (ROOT / name).read_text()


def names():
    """README.md and every page of docs/ and results/."""
    found = (path for folder in ("docs", "results") for path in (ROOT / folder).rglob("*.md"))
    return ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in found)]


def steps(text):
    """The commands and the blocks of Python of a page, in its order, but for what is "Not run:"."""
    for match in _BLOCK.finditer(text):
        if text[: match.start()].endswith("ot run:\n\n"):
            continue
        if match[1] == "python":
            yield match[2]
        else:
            joined = match[2].replace("\\\n", " ").splitlines()
            yield from (Command(line) for line in joined if line and not line.startswith("#"))


def of_few_patients(code):
    """The tutorial's code that writes pictures of patients, with fewer of them."""
    return code.replace("range(1800)", "range(120)")


def commands(text):
    """Every command of FedDPSD or Flower that is a line of a page."""
    return [Command(line) for line in _TYPED.findall(text)]
