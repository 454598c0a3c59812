"""Who may import whom, and a few rules that only a look at the sources can keep."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fed_dpsd"
# Each room, and what it may import besides itself: the rooms of its own line and all above it.
LADDER = (
    {"classes", "errors", "storage", "protocol", "streams", "progress"},
    {"plugins"},
    {"config", "keys", "overrides"},
    {"binder", "cohort", "losses", "data", "models", "report", "privacy"},
    {"methods"},
    {"claims"},
    {"combinations"},
    {"experiment"},
    {"accounts"},
    {"client", "server"},
    {"simulation"},
    {"flower"},
    {"audits"},
    {"display"},
    {"planned"},
    {"api"},
    {"bench"},
    {"cli"},
)
APART = {  # rooms that know less than their place on the ladder would let them
    "privacy": {"privacy"},
    "report": {"config", "errors", "report", "storage"},
    "storage": {"errors", "storage"},
    "errors": {"errors"},
    "protocol": {"errors", "protocol"},
    "streams": {"streams"},
    "progress": {"progress"},
    "display": {"display", "progress"},
}
WALL = {"client": "server", "server": "client"}
FILES = sorted([*PACKAGE.rglob("*.py"), *ROOT.glob("*_app/*.py")])


@functools.cache
def nodes(source):
    return tuple(ast.walk(ast.parse(source)))


@functools.cache
def imports(source):
    """Absolute names of everything that a file's source imports, wherever in it."""
    names = []
    for node in nodes(source):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import: {ast.unparse(node)}"
            names.append(node.module)
            if node.module.startswith("fed_dpsd"):
                names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


def room_of(name):
    """The room of a module fed_dpsd.ROOM..., or of a file's path in the package."""
    return name.split(".")[1]


def allowed(room):
    below = set()
    for rung in LADDER:
        below |= rung
        if room in rung:
            below -= rung - {room} if room in WALL else set()
            return APART.get(room, below)
    raise AssertionError(f"{room} has no place on the ladder")


def strangers(room, source):
    """What a file of a room imports of rooms that it may not know."""
    names = {name for name in imports(source) if name.startswith("fed_dpsd.")}
    return {n for n in names if room_of(n) not in allowed(room) | {"__version__"}}


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# But for the package itself, whose public names are imported when they are first used.
MODULES = {
    module_of(path): path.read_text()
    for path in FILES
    if path.parent != ROOT / "fed_dpsd" or path.stem != "__init__"
}


def reached(module, sources=MODULES):
    """Every module that importing one leads to, at any distance."""
    found, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name in found or name not in sources:
            continue
        found.add(name)
        todo += imports(sources[name])
    return found - {module}


def crossing(module, sources=MODULES):
    """The modules beyond the wall that a module leads to; "" where it stands on neither side."""
    side = {"fed_dpsd.flower.client": "client", "client_app": "client"}
    side |= {"fed_dpsd.flower.server": "server", "fed_dpsd.flower.grid": "server"}
    side |= {"server_app": "server"}
    own = side.get(module) or (room_of(module) if module.count(".") else "")
    beyond = WALL.get(own)
    return {name for name in reached(module, sources) if beyond and room_of(f"{name}.") == beyond}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=module_of)
def test_rooms_import_only_what_lies_below_them(path):
    if path == PACKAGE / "__init__.py":
        return
    assert not strangers(room_of(module_of(path)), path.read_text())


@pytest.mark.parametrize("module", MODULES)
def test_neither_side_of_the_wall_leads_to_the_other(module):
    assert not crossing(module)


@pytest.mark.parametrize(
    ("module", "planted"),
    [
        ("fed_dpsd.client.teachers", "from fed_dpsd.server.metrics import accuracy"),
        ("fed_dpsd.server.metrics", "import fed_dpsd.client.site"),
        ("fed_dpsd.server.run", "def late():\n    from fed_dpsd.client.teachers import Teachers"),
        ("fed_dpsd.accounts.card", "from fed_dpsd.client.site import Site"),
        ("fed_dpsd.privacy.noise", "from fed_dpsd.config import UserError"),
        ("fed_dpsd.methods.local", "from fed_dpsd import experiment"),
    ],
)
def test_a_planted_import_is_caught(module, planted):
    source = f"{MODULES[module]}\n{planted}\n"
    assert strangers(room_of(module), source)
    if room_of(module) in WALL or module == "fed_dpsd.accounts.card":
        assert crossing("fed_dpsd.server.run", MODULES | {module: source}) or crossing(
            "fed_dpsd.client.site", MODULES | {module: source}
        )


def test_no_room_holds_a_fifth_of_the_code():
    lines = {}
    for path in PACKAGE.rglob("*.py"):
        room = room_of(module_of(path)) if path.parent != PACKAGE else path.stem
        lines[room] = lines.get(room, 0) + len(path.read_text().splitlines())
    assert max(lines.values()) < 0.2 * sum(lines.values()), lines


def test_no_module_leads_back_to_itself():
    known = {module: reached(module) for module in MODULES}
    for module in MODULES:
        direct = set(imports(MODULES[module])) & set(MODULES)
        assert not [name for name in direct if name != module and module in known[name]], module


@pytest.mark.parametrize(
    ("library", "places"),
    [
        (
            "flwr",
            {
                "fed_dpsd/bench/flower_fedavg.py",
                "fed_dpsd/flower/client.py",
                "fed_dpsd/flower/codec.py",
                "fed_dpsd/flower/grid.py",
                "fed_dpsd/flower/supernode.py",
                "fed_dpsd/flower/server.py",
                "client_app/__init__.py",
                "server_app/__init__.py",
            },
        ),
        ("flwr_datasets", {"fed_dpsd/data/partition.py"}),
        ("hydra", {"fed_dpsd/overrides.py"}),
        ("pickle", set()),
    ],
)
def test_libraries_are_imported_where_they_belong(library, places):
    users = {
        path.relative_to(ROOT).as_posix()
        for path in FILES
        if any(name.split(".")[0] == library for name in imports(path.read_text()))
    }
    assert users == places


def test_published_numbers_are_read_only_where_results_are_written():
    users = [p.stem for p in FILES if "fed_dpsd.privacy.published" in set(imports(p.read_text()))]
    assert users == ["card", "attacks"]


@functools.cache
def calls(path):
    return {ast.unparse(n.func) for n in nodes(path.read_text()) if isinstance(n, ast.Call)}


def test_no_module_but_the_laws_makes_an_accountant():
    makers = {p.stem for p in FILES if any("Accountant" in name for name in calls(p))}
    assert makers <= {"laws"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_no_global_generator_no_torch_load_no_assert_on_input(path):
    banned = {"torch.manual_seed", "np.random.seed", "random.seed", "eval", "exec"}
    if path.stem != "efficientnet":  # a package's weights, whose hash is checked before
        banned.add("torch.load")
    assert not banned & calls(path)
    drawn = {"torch.randn", "torch.rand", "torch.randint", "torch.randperm"}
    for node in nodes(path.read_text()):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in drawn:
            assert "generator" in {keyword.arg for keyword in node.keywords}
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert {k.arg: ast.unparse(k.value) for k in node.keywords} == {"weights_only": "True"}
        if isinstance(node, ast.Attribute):
            module_draws = {"np.random." + n for n in ("normal", "rand", "randn", "choice")}
            assert ast.unparse(node) not in module_draws


def test_no_answer_is_built_from_a_sensitive_value():
    for path in FILES:
        for node in nodes(path.read_text()):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Answer":
                assert "sensitive" not in ast.unparse(node)


def test_every_file_opens_with_a_docstring_and_stays_readable():
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text())), path
        assert len(path.read_text().splitlines()) <= 400, path
