"""Import rules, and a few rules that only a check of the sources can enforce."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fed_dpsd"
# Each room may import itself, the rooms on its own line and all rooms above.
LADDER = (
    {"classes", "context", "errors", "storage", "protocol", "streams", "progress"},
    {"config"},
    {"losses", "data", "models", "privacy"},
    {"methods"},
    {"checks", "claims"},
    {"experiment"},
    {"needs"},
    {"accounts"},
    {"report"},
    {"client", "server"},
    {"sweep"},
    {"engines"},
    {"api"},
    {"papers"},
    {"rehearsal"},
    {"audits"},
    {"cli"},
    {"__main__"},
)
APART = {  # rooms that may import less than their place on the ladder allows
    "privacy": {"losses", "privacy"},
    "losses": {"losses"},
    "report": {"accounts", "config", "errors", "privacy", "report", "storage"},
    "storage": {"errors", "storage"},
    "errors": {"errors"},
    "protocol": {"classes", "errors", "protocol"},
    "streams": {"streams"},
    "context": {"context"},
    "progress": {"context", "errors", "progress"},
}
OUTER = {"papers", "rehearsal", "audits"}  # the command line alone imports them
WALL = {"client": "server", "server": "client"}
FILES = sorted([*PACKAGE.rglob("*.py"), *ROOT.glob("*_app/*.py")])


@functools.cache
def nodes(source):
    return tuple(ast.walk(ast.parse(source)))


@functools.cache
def imports(source):
    """Absolute names of everything that a file imports, anywhere."""
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
    """A file's imports from rooms that its room may not import."""
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
    """All modules that importing one module imports, directly or not."""
    found, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name in found or name not in sources:
            continue
        found.add(name)
        todo += imports(sources[name])
    return found - {module}


def crossing(module, sources=MODULES):
    """The modules beyond the wall that a module imports; "" if it is on neither side."""
    side = {"fed_dpsd.engines.flower.client": "client", "client_app": "client"}
    side |= {"fed_dpsd.engines.flower.server": "server", "fed_dpsd.engines.flower.grid": "server"}
    side |= {"server_app": "server"}
    own = side.get(module) or (room_of(module) if module.count(".") else "")
    beyond = WALL.get(own)
    return {name for name in reached(module, sources) if beyond and room_of(f"{name}.") == beyond}


def test_rooms_import_only_what_lies_below_them():
    for module, source in MODULES.items():
        if module.startswith("fed_dpsd."):
            assert not strangers(room_of(module), source), module


def test_the_core_leads_to_no_outer_room():
    """Papers, audits and rehearsals build on the core, as plug-ins do."""

    def outer(module, sources=MODULES):
        return {room_of(f"{name}.") for name in reached(module, sources)} & OUTER

    core = [m for m in MODULES if room_of(f"{m}.") not in OUTER | {"cli", "__main__"}]
    assert {module: found for module in core if (found := outer(module))} == {}
    planted = "def late():\n    from fed_dpsd.papers.gradient_sum import GradientSum"  # the control
    changed = MODULES | {"fed_dpsd.checks": f"{MODULES['fed_dpsd.checks']}\n{planted}\n"}
    assert {module for module in core if outer(module, changed)} > {"fed_dpsd.experiment"}


def test_privacy_imports_no_other_room_but_the_losses():
    assert APART["privacy"] == {"losses", "privacy"}
    own = [module for module in MODULES if module.startswith("fed_dpsd.privacy")]
    assert own
    for module in own:
        assert {room_of(name) for name in reached(module)} <= APART["privacy"], module


def test_neither_side_of_the_wall_leads_to_the_other():
    assert {module: found for module in MODULES if (found := crossing(module))} == {}


def test_a_planted_import_is_caught():
    """The control: at the top of a file or late in a function, and through a third room."""
    for module, planted in (
        ("fed_dpsd.client.teachers", "from fed_dpsd.server.metrics import accuracy"),
        ("fed_dpsd.server.metrics", "import fed_dpsd.client.site"),
        ("fed_dpsd.server.run", "def late():\n    from fed_dpsd.client.teachers import Teachers"),
        ("fed_dpsd.accounts.card", "from fed_dpsd.client.site import Site"),
        ("fed_dpsd.privacy.noise", "from fed_dpsd.config import UserError"),
        ("fed_dpsd.methods.local", "from fed_dpsd import experiment"),
        ("fed_dpsd.engines.flower.supernode", "from fed_dpsd.rehearsal.sites import write_site"),
        ("fed_dpsd.checks", "from fed_dpsd.papers.gradient_sum import GradientSum"),
    ):
        source = f"{MODULES[module]}\n{planted}\n"
        assert strangers(room_of(module), source), module
        if room_of(module) in WALL or module == "fed_dpsd.accounts.card":
            changed = MODULES | {module: source}
            sides = ("fed_dpsd.server.run", "fed_dpsd.client.site")
            assert any(crossing(side, changed) for side in sides), module


def test_no_module_leads_back_to_itself():
    known = {module: reached(module) for module in MODULES}
    for module in MODULES:
        direct = set(imports(MODULES[module])) & set(MODULES)
        assert not [name for name in direct if name != module and module in known[name]], module


FLOWER = ("client", "codec", "grid", "server", "simulated", "supernode")
LIBRARIES = {
    "flwr": {f"fed_dpsd/engines/flower/{name}.py" for name in FLOWER},
    "flwr_datasets": {"fed_dpsd/data/partition.py"},
    "hydra": {"fed_dpsd/config/compose.py"},
    **{name: set() for name in ("pickle", "dill", "cloudpickle", "joblib", "shelve")},
}


def test_libraries_are_imported_where_they_belong_and_pickle_nowhere():
    for library, places in LIBRARIES.items():
        users = {
            path.relative_to(ROOT).as_posix()
            for path in FILES
            if any(name.split(".")[0] == library for name in imports(path.read_text()))
        }
        assert users == places, library


@functools.cache
def calls(path):
    return {ast.unparse(n.func) for n in nodes(path.read_text()) if isinstance(n, ast.Call)}


def test_no_module_but_the_events_makes_an_accountant():
    makers = {p.stem for p in FILES if any("Accountant" in name for name in calls(p))}
    assert makers <= {"events"}


DRAWN = {"torch.randn", "torch.rand", "torch.randint", "torch.randperm"}
MODULE_DRAWS = {f"np.random.{name}" for name in ("normal", "rand", "randn", "choice")}
BANNED = {"torch.manual_seed", "np.random.seed", "random.seed", "eval", "exec"}


def faults(stem, source):
    """Calls that no file may make: global generators, code from text, and unsafe reading."""
    # A package's weights, whose hash is checked before.
    banned = BANNED | (set() if stem == "efficientnet" else {"torch.load"})
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in MODULE_DRAWS:
            yield ast.unparse(node)
        if not isinstance(node, ast.Call):
            continue
        name, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        if (
            name in banned
            or (name in DRAWN and "generator" not in given)
            or (name == "torch.load" and given != {"weights_only": "True"})
        ):
            yield ast.unparse(node)


def test_no_global_generator_no_torch_load_no_code_from_text():
    own = [path for path in FILES if path.parent.name != "peers"]  # peers draw from global ones
    found = {path: list(faults(path.stem, path.read_text())) for path in own}
    assert {path: calls for path, calls in found.items() if calls} == {}
    for planted in ("torch.load(f)", "torch.randn(3)", "np.random.rand()", "eval(text)"):
        assert list(faults("site", planted))  # the control
    assert list(faults("efficientnet", "torch.load(f, weights_only=False)"))
