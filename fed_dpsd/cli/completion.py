"""Completion of commands, options and overrides (KEY=VALUE) in bash, zsh and fish.

A shell calls this at each TAB, so only the completion of architectures imports torch.
"""

import os

import typer
from click.shell_completion import CompletionItem, add_completion_class, split_arg_string
from typer import _completion_shared
from typer._completion_classes import BashComplete, ZshComplete

# Neither shell may add a space after `rounds=` or `privacy.`.
BASH = """
%(complete_func)s() {
    local IFS=$'\\n'
    local line="${COMP_LINE:0:COMP_POINT}"
    COMPREPLY=( $( env COMP_LINE="$line" %(autocomplete_var)s=complete_bash "$1" ) )
    if [[ $COMP_WORDBREAKS == *=* && $line =~ =[^[:space:]]*$ ]]; then
        COMPREPLY=( "${COMPREPLY[@]##*=}" )  # bash replaces what follows the last =
    fi
    if [[ "${COMPREPLY[0]}" == *[=.] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}

complete -o default -F %(complete_func)s %(prog_name)s
"""
ZSH = """
#compdef %(prog_name)s

%(complete_func)s() {
    local -a lines begun whole
    lines=("${(@f)$(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" \\
                    %(autocomplete_var)s=complete_zsh %(prog_name)s)}")
    if [[ -z "$lines" ]]; then
        compset -P '*='
        _files
        return
    fi
    begun=(${(M)lines:#[^:]#[=.]:*})
    whole=(${lines:#[^:]#[=.]:*})
    (( $#begun )) && _describe -V key begun -S ''
    (( $#whole )) && _describe -V choice whole
}

compdef %(complete_func)s %(prog_name)s
"""


class Bash(BashComplete):
    """Bash, which passes the whole line, since it splits words at each =."""

    source_template = BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor, and the word under the cursor."""
        line = os.environ["COMP_LINE"]
        words = split_arg_string(line)[1:] + [""] * line.endswith(" ")
        return words[:-1], words[-1]


class Zsh(ZshComplete):
    """Zsh, which shows a description of each choice."""

    source_template = ZSH

    def format_completion(self, item: CompletionItem) -> str:
        """Return a line for zsh's _describe."""
        value = str(item.value).replace(":", "\\:")
        return f"{value}:{item.help or item.value}"

    def complete(self) -> str:
        """Return a line for each completion; none if a file name is expected."""
        return "\n".join(
            map(self.format_completion, self.get_completions(*self.get_completion_args()))
        )


def register() -> None:
    """Register the classes and scripts above with click and typer."""
    add_completion_class(Bash, "bash")
    add_completion_class(Zsh, "zsh")
    _completion_shared._completion_scripts.update(bash=BASH, zsh=ZSH)


def complete_override(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the completions of an override, each with a description.

    Groups and keys end with "=", sections of keys with ".". After a comma, as in a sweep, the next
    value is completed.
    """
    typed = dict(word.split("=", 1) for word in ctx.params.get("overrides") or () if "=" in word)
    key, equals, value = incomplete.partition("=")
    if equals:
        done, comma, _ = value.rpartition(",")
        before = f"{key}={done}{comma}"
        return [(before + choice, line) for choice, line in _values(key, typed).items()]
    return list(_names(key, typed).items())


def _values(name: str, typed: dict[str, str]) -> dict[str, str]:
    """Return the known values of a group or key, each with a description."""
    from fed_dpsd.config import keys

    group = name.partition("@")[0]
    if group in keys.groups():
        return keys.choices(group)
    if name in ("model.teacher", "model.student", "teacher.arch"):
        from fed_dpsd.models.classifiers import CLASSIFIERS  # imports torch

        return dict.fromkeys(CLASSIFIERS, "")
    found = (keys.alternatives(key) for key in keys.all_keys(typed) if key.name == name)
    return dict.fromkeys(next(found, []), "")


def _names(begun: str, typed: dict[str, str]) -> dict[str, str]:
    """Return groups, keys and sections; a section's keys appear only after its name is typed."""
    from fed_dpsd.config import keys

    section = begun[: begun.rfind(".") + 1]
    groups = {} if section else keys.groups()
    names = {f"{group}=": f"see fed-dpsd list: {group}" for group in groups}
    for key in keys.all_keys(typed):
        if key.name.startswith(section):
            first, dot, _ = key.name[len(section) :].partition(".")
            if dot:
                names.setdefault(f"{section}{first}.", f"keys of {section}{first}")
            else:
                names[f"{key.name}="] = f"{key.value} {key.meaning}".strip()
    return names
