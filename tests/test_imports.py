"""Import rules: who may import what, and what nobody may do."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import canal_mpi

PACKAGE = Path(canal_mpi.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
OWNERS = {
    "mpi4py": ("topology/transport.py", "rank/"),
    "torch": ("learn/",),
    "numba": ("state.py",),
    "h5py": ("results/",),
    "gymnasium": ("envs/",),
    "ale_py": ("envs/",),
    "click": ("cli.py", "commands/"),
    "pandas": ("results/",),
    "pyarrow": ("results/",),
    "prometheus_client": ("results/",),
    "tensorboardX": ("trackers.py",),
    "wandb": ("trackers.py",),
    "imageio": ("evaluation.py",),
    "networkx": ("topology/",),
    "matplotlib": ("report/", "experiments/"),
    "jinja2": ("report/", "experiments/"),
    "markupsafe": ("report/",),
}
BASE = {"interfaces", "errors", "settings", "config", "state", "games", "launcher"}
LAYERS = {  # what a package may import beside BASE; others (rank, cli, …) put the parts together
    "membuf": set[str](),
    "learn": set[str](),
    "topology": {"membuf"},
    "envs": {"membuf"},
    "agent": {"membuf"},
    "results": {"membuf", "topology", "evaluation"},
}
LATER = (
    "mpi4py",
    "torch",
    "gymnasium",
    "ale_py",
    "h5py",
    "numba",
    "networkx",
    "jinja2",
    "matplotlib",
)  # not for --help
PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
LOWER_CASE = {
    "send",
    "recv",
    "isend",
    "irecv",
    "ssend",
    "bsend",
    "issend",
    "ibsend",
    "sendrecv",
    "bcast",
    "ibcast",
    "gather",
    "igather",
    "scatter",
    "allgather",
    "alltoall",
    "reduce",
    "allreduce",
    "scan",
    "exscan",
    "neighbor_allgather",
    "neighbor_alltoall",
}
COMMUNICATORS = {"comm", "graph", "world_comm", "COMM_WORLD", "COMM_SELF"}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere in the file, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and last_part(node.func) == "import_extra":
            assert isinstance(node.args[0], ast.Constant)
            yield str(node.args[0].value)


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str, str]]:
    """Every call with the last two parts of its name: ("comm", "Send") for self.comm.Send()."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name):
                yield node, "", function.id
            elif isinstance(function, ast.Attribute):
                yield node, last_part(function.value), function.attr


def last_part(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def faults(tree: ast.AST) -> list[str]:
    """What no file of the package may do."""
    found = [f"imports {name}" for name in imported(tree) if name.split(".")[0] in PICKLERS]
    for call, owner, name in calls(tree):
        if not owner and name in ("eval", "exec", "__import__"):
            found.append(f"{name}()")
        if (owner, name) in (
            ("torch", "load"),
            ("torch", "save"),
            ("os", "system"),
            ("os", "popen"),
        ):
            found.append(f"{owner}.{name}()")
        if (owner, name) in (("np", "load"), ("np", "save"), ("numpy", "load")):
            found.append(f"{owner}.{name}()")
        for keyword in call.keywords:
            value = getattr(keyword.value, "value", None)
            if keyword.arg in ("shell", "allow_pickle") and value is not False:
                found.append(f"{keyword.arg}=")
        if name in LOWER_CASE and (owner in COMMUNICATORS or owner.endswith("comm")):
            found.append(f"{owner}.{name}()")
    return found


def test_the_package_is_found() -> None:
    assert {"agent/loop.py", "cli.py", "envs/atari.py", "topology/transport.py"} <= set(
        map(name_of, FILES)
    )


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_library_stays_in_its_modules(path: Path) -> None:
    for module in imported(tree_of(path)):
        owners = OWNERS.get(module.split(".")[0])
        assert owners is None or name_of(path).startswith(owners), f"{name_of(path)}: {module}"


@pytest.mark.parametrize("library", OWNERS)
def test_every_rule_is_used(library: str) -> None:
    """A library that nobody imports any more would leave its rule without meaning."""
    users = [p for p in FILES if any(m.split(".")[0] == library for m in imported(tree_of(p)))]
    assert users


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_pickles_evaluates_or_starts_a_shell(path: Path) -> None:
    assert faults(tree_of(path)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from shelve import open",
        "import marshal as m",
        "eval('1')",
        "exec('1')",
        "torch.load(path)",
        "subprocess.run('ls', shell=True)",
        "np.load(path, allow_pickle=True)",
        "comm.send(1, 0)",
        "self.comm.bcast(1)",
        "MPI.COMM_WORLD.gather(1)",
        "graph.neighbor_allgather(1)",
    ],
)
def test_the_search_for_faults_finds_them(source: str) -> None:
    assert faults(ast.parse(source))


@pytest.mark.parametrize(
    "source", ["comm.Isend(1)", "env.send(1)", "re.compile('x')", "x.evaluate()"]
)
def test_the_search_for_faults_finds_nothing_else(source: str) -> None:
    assert faults(ast.parse(source)) == []


def test_packages_import_only_what_lies_below_them() -> None:
    for path in FILES:
        package = name_of(path).split("/")[0].removesuffix(".py")
        allowed = LAYERS.get(package)
        ours = {m.split(".")[1] for m in imported(tree_of(path)) if m.startswith("canal_mpi.")}
        assert allowed is None or ours <= BASE | allowed | {package}, name_of(path)


TRAINS = """
import sys
from canal_mpi import config, envs
from canal_mpi.rank import build
from canal_mpi.results.store import Rows
from canal_mpi.topology.exchange import alone

flags = {"tasks": ["Krull", "Alien"], "train.steps": 40, "learn.learning_starts": 8}
flags |= {"learn.batch_size": 8}
flags |= {"evaluation.episodes": 1, "evaluation.max_steps": 20, "rehearsal.ewc_lambda": 1.0}
flags |= {"learn.max_grad_norm": 0.1, "rehearsal.ewc_batches": 2}
job = envs.named(config.resolve(flags))
agent = build.make_agent(job, 0, job.tasks, alone, Rows(), lambda progress: None)
agent.run()
agent.learner.load_state_dict(agent.learner.state_dict())
agent.learner.set_teacher(agent.learner.get_weights())
print(agent.learner.updates, "torch" in sys.modules)
"""


@pytest.mark.atari
def test_an_mlp_on_the_cpu_learns_atari_without_torch() -> None:
    program = [sys.executable, "-c", TRAINS]
    done = subprocess.run(program, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    updates, torch = done.stdout.split()
    assert int(updates) > 40
    assert torch == "False"


def test_help_loads_neither_mpi_nor_torch() -> None:
    """What cli.py imports at its top, and what that imports at its top, and so on."""
    reached, waiting = set[str](), ["canal_mpi.cli", "canal_mpi.config"]
    while waiting:
        module = waiting.pop()
        path = PACKAGE.joinpath(*module.split(".")[1:])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module in reached or not file.is_file():
            continue
        reached.add(module)
        top = [n for n in tree_of(file).body if isinstance(n, ast.Import | ast.ImportFrom)]
        for name in (name for node in top for name in imported(node)):
            assert name.split(".")[0] not in LATER
            waiting += [name, name.rpartition(".")[0]] if name.startswith("canal_mpi") else []
    assert "canal_mpi.membuf.selection" in reached
