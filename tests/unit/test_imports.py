"""Which part of the library may import which, read from the source; and what importing it loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "raycomm"

# Part -> parts of raycomm that it may import, besides itself. "_core" is the native module, "" the package (its version).
ALLOWED = {
    "errors": set(),
    "options": {"errors"},
    "codec": {"errors", "options", "_core"},
    "channel": {"errors", "options", "codec", "device", "_core"},
    "comm": {"errors", "options", "codec", "channel", "_core"},
    "graph": {"errors", "options"},
    "plan": {"errors", "options", "graph"},
    "observe": {"errors", "options", "plan", "channel", "_core"},
    "device": {"errors", "options"},
    "testing": {"errors", "options", "graph", "plan", "device"},
    "runtime": {"", "errors", "options", "codec", "channel", "comm", "device", "graph", "plan", "observe", "testing", "_core"},
    "ray_dag": {"errors", "options", "graph", "plan", "runtime"},
    "cli": {"", "errors", "options", "graph", "plan"},
    "__main__": {"cli"},
}
MAY_IMPORT_RAY = {"runtime", "ray_dag"}
# Users implement an interface of Ray's that lies beside its compiled graphs.
RAYS_COMMUNICATORS = "ray_communicator.py"
# torch has its rooms, which are entered when the first tensor comes; cupy is only ever found in sys.modules.
CUPY_ROOMS = ("device/cuda.py", "device/found.py", "device/nccl.py")
TORCH_ROOMS = (
    "codec/tensor.py",
    "runtime/torch_tensors.py",
    "device/cpu.py",
    "device/combining.py",
    "device/gloo.py",
    "device/host_ordered.py",
    "channel/device.py",
    "channel/moving.py",
    "runtime/device_collectives.py",
    "runtime/links.py",
    "runtime/ray_communicator.py",
    *CUPY_ROOMS,
)


def parts() -> list[str]:
    return sorted({path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")} - {"__init__"})


def imports(file: Path) -> list[tuple[str, int, bool, bool]]:
    """(module, line, whether it runs when the module is imported, whether it is for type checkers only)."""
    found: list[tuple[str, int, bool, bool]] = []

    def visit(node: ast.AST, at_import: bool, checking: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno, at_import, checking) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            if node.module == "raycomm":
                found.extend((f"raycomm.{alias.name}", node.lineno, at_import, checking) for alias in node.names)
            else:
                found.append((str(node.module), node.lineno, at_import, checking))
        for child in ast.iter_child_nodes(node):
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and child in node.body
            visit(child, at_import and not inside, checking or guarded)

    visit(ast.parse(file.read_text(), str(file)), True, False)
    return found


def part_of(module: str) -> str | None:
    """The part of raycomm that a module name belongs to; None outside raycomm."""
    names = module.split(".")
    if names[0] != "raycomm":
        return None
    part = names[1] if len(names) > 1 else ""
    return "" if part.startswith("__") else part


def test_the_table_names_every_part() -> None:
    assert set(parts()) <= set(ALLOWED), "a new part needs its row in ALLOWED"
    assert {"graph", "plan", "codec", "channel", "runtime", "ray_dag", "observe"} <= set(parts())


def test_imports_point_one_way() -> None:
    wrong = []
    for part in parts():
        files = [PACKAGE / f"{part}.py"] if (PACKAGE / f"{part}.py").exists() else sorted((PACKAGE / part).rglob("*.py"))
        for file in files:
            for module, line, _, checking in imports(file):
                to = part_of(module)
                if to is not None and to != part and to not in ALLOWED[part] and not checking:
                    wrong.append(f"{file.relative_to(PACKAGE)}:{line}: {part} imports {module}")
    assert wrong == []


def test_the_table_has_no_cycle() -> None:
    """What is allowed is an order: taking away parts that depend on nothing left, all go."""
    left = {part: {to for to in allowed if to not in ("", "_core")} for part, allowed in ALLOWED.items()}
    while left:
        free = [part for part, needs in left.items() if not needs & set(left)]
        assert free, f"a cycle among {sorted(left)}"
        for part in free:
            del left[part]


def test_only_the_runtime_and_ray_dag_import_ray() -> None:
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for module, line, _, checking in imports(file):
            top = module.split(".")[0]
            if top == "ray" and part not in MAY_IMPORT_RAY and not checking:
                wrong.append(f"{file.relative_to(PACKAGE)}:{line}: {module}")
            inner = module.startswith(("ray.dag", "ray.experimental")) and file.name != RAYS_COMMUNICATORS
            if inner and part != "ray_dag":
                wrong.append(f"{file.relative_to(PACKAGE)}:{line}: {module} outside ray_dag")
    assert wrong == []


def test_torch_and_cupy_have_their_rooms() -> None:
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        for module, line, at_import, checking in imports(file):
            top = module.split(".")[0]
            room = module in ("raycomm.codec.tensor", "raycomm.runtime.torch_tensors")
            into_room = room and at_import and name not in TORCH_ROOMS
            astray = (top == "torch" and name not in TORCH_ROOMS) or (top == "cupy" and (name not in CUPY_ROOMS or at_import))
            if not checking and (astray or into_room):
                wrong.append(f"{name}:{line}: {module}")
    assert wrong == []


def test_pickle_has_one_room() -> None:
    users = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        for module, *_ in imports(file)
        if module.split(".")[0] in ("pickle", "cloudpickle")
    }
    assert users == {"codec/fallback.py"}


@pytest.mark.parametrize(
    ("module", "not_loaded"),
    [
        ("raycomm", {"ray", "torch", "cupy", "numpy"}),
        ("raycomm.errors", {"ray", "torch", "cupy", "numpy"}),
        ("raycomm.options", {"ray", "torch", "cupy", "numpy"}),
        *((f"raycomm.graph.{file.stem}", {"ray", "torch", "cupy"}) for file in sorted((PACKAGE / "graph").glob("[a-z]*.py"))),
        *((f"raycomm.plan.{file.stem}", {"ray", "torch", "cupy"}) for file in sorted((PACKAGE / "plan").glob("[a-z]*.py"))),
        ("raycomm.codec", {"ray", "torch", "cupy"}),
        ("raycomm.channel", {"ray", "torch", "cupy"}),
        ("raycomm.device", {"ray", "torch", "cupy"}),
        ("raycomm.testing.simulated", {"ray", "torch", "cupy"}),
        ("raycomm.testing.simulated_communicator", {"ray", "torch", "cupy"}),
        ("raycomm.cli", {"ray", "torch", "cupy", "numpy"}),
        ("raycomm.runtime.loop", {"torch", "cupy"}),
        # What every actor loads before its first graph, which is most of what compiling costs then.
        (
            "raycomm.runtime.setup",
            {"torch", "cupy", "raycomm.graph.nodes", "raycomm.plan.text", "raycomm.plan.lowering"},
        ),
        ("raycomm.runtime.driver", {"torch", "cupy"}),
    ],
)
def test_what_an_import_loads(module: str, not_loaded: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({not_loaded!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.returncode) == ([], 0), done.stderr


def test_the_public_names_are_there_and_lazy() -> None:
    code = (
        "import sys, raycomm\n"
        "from raycomm import InputNode, bind, CompileError, Options\n"
        "print('ray' in sys.modules, 'torch' in sys.modules)\n"
        "assert set(dir(raycomm)) == set(raycomm.__all__)\n"
        "missing = [name for name in raycomm.__all__ if not hasattr(raycomm, name)]\n"
        "print(missing)\n"
        "try:\n    raycomm.no_such_name\nexcept AttributeError as error:\n    print('no_such_name' in str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["False False", "[]", "True"], done.stderr
