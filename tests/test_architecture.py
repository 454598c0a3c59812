"""Who may import whom, and a few rules that only a look at the sources can keep."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fed_dpsd"
LOWEST = {"protocol", "config", "streams"}
ALLOWED = {
    "protocol": set(),
    "streams": set(),
    "config": set(),
    "binder": {"config"},
    "privacy": {"privacy"},
    "losses": LOWEST,
    "data": LOWEST | {"data"},
    "models": LOWEST | {"models"},
    "methods": LOWEST | {"methods", "models", "losses", "data", "privacy"},
    "runtime": LOWEST | {"binder", "runtime", "methods", "models", "losses", "data", "privacy"},
    "report": LOWEST | {"report"},
    "cli": LOWEST | {"cli", "runtime", "methods", "models", "losses", "data", "privacy", "report"},
}
FILES = sorted([*PACKAGE.rglob("*.py"), *ROOT.glob("*_app/*.py")])


def imports(path):
    """Absolute names of everything a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module.startswith("fed_dpsd"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_rooms_import_only_what_lies_below_them(path):
    if path == PACKAGE / "__init__.py":
        assert not list(imports(path))
        return
    used = {name.split(".")[1] for name in imports(path) if name.startswith("fed_dpsd.")}
    allowed = ALLOWED[room(path)] | {"__version__"}
    assert used <= allowed, f"{path} imports {used - allowed}"


@pytest.mark.parametrize(
    ("library", "places"),
    [
        (
            "flwr",
            {
                "fed_dpsd/runtime/flower/client.py",
                "fed_dpsd/runtime/flower/codec.py",
                "fed_dpsd/runtime/flower/pinned.py",
                "fed_dpsd/runtime/flower/server.py",
                "client_app/__init__.py",
                "server_app/__init__.py",
            },
        ),
        ("flwr_datasets", {"fed_dpsd/data/partition.py"}),
        ("hydra", {"fed_dpsd/config.py"}),
        ("pickle", set()),
    ],
)
def test_libraries_are_imported_where_they_belong(library, places):
    users = {
        path.relative_to(ROOT).as_posix()
        for path in FILES
        if any(name.split(".")[0] == library for name in imports(path))
    }
    assert users == places


def test_published_numbers_are_read_only_where_results_are_written():
    users = [p.stem for p in FILES if "fed_dpsd.privacy.published" in set(imports(p))]
    assert users == ["audits", "card"]


def calls(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_no_module_but_the_laws_makes_an_accountant():
    makers = {p.stem for p in FILES if any("Accountant" in name for name in calls(p))}
    assert makers <= {"laws"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_no_global_generator_no_torch_load_no_assert_on_input(path):
    banned = {"torch.manual_seed", "np.random.seed", "random.seed", "torch.load", "eval", "exec"}
    assert not banned & set(calls(path))
    drawn = {"torch.randn", "torch.rand", "torch.randint", "torch.randperm"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in drawn:
            assert "generator" in {keyword.arg for keyword in node.keywords}
        if isinstance(node, ast.Attribute):
            module_draws = {"np.random." + n for n in ("normal", "rand", "randn", "choice")}
            assert ast.unparse(node) not in module_draws


def test_no_answer_is_built_from_a_sensitive_value():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Answer":
                assert "sensitive" not in ast.unparse(node)


def test_every_file_opens_with_a_docstring_and_stays_readable():
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text())), path
        assert len(path.read_text().splitlines()) <= 400, path
