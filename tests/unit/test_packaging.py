"""What a user gets with the package, and that its files agree with each other. CI builds and installs a wheel."""

import importlib.util
import re
import subprocess
from importlib import metadata, resources
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests import ROOT


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """native/build.py, which finds its files from the project's root."""
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "native" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        spec.loader.exec_module(module)
    return module


def test_installed_version_is_the_changelogs() -> None:
    latest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", text("CHANGELOG.md"), re.MULTILINE)
    assert latest is not None
    assert latest[1] == metadata.version("commlayer")


def test_supported_pythons_and_torches() -> None:
    assert metadata.metadata("commlayer")["Requires-Python"] == ">=3.10"
    requirements = [Requirement(line) for line in metadata.requires("commlayer") or []]
    (torch,) = [requirement.specifier for requirement in requirements if requirement.name == "torch"]
    assert ["2.10.0" in torch, "2.11.0" in torch, "2.15.0" in torch, "2.16.0" in torch] == [False, True, True, False]


def test_conda_recipe_and_citation_are_of_this_version() -> None:
    recipe, citation = yaml.safe_load(text("conda/recipe.yaml")), yaml.safe_load(text("CITATION.cff"))
    assert [recipe["context"]["version"], citation["version"]] == [metadata.version("commlayer")] * 2
    licence = metadata.metadata("commlayer")["License-Expression"]
    assert [recipe["about"]["license"], citation["license"]] == [licence, licence]


def test_conda_recipe_has_the_dependencies_of_the_package() -> None:
    recipe = yaml.safe_load(text("conda/recipe.yaml"))["requirements"]["run"]
    rows = [row["then"] if isinstance(row, dict) else row for row in recipe]
    conda = {"python": SpecifierSet(metadata.metadata("commlayer")["Requires-Python"])}
    for requirement in (Requirement(line) for line in metadata.requires("commlayer") or []):
        if "extra" not in str(requirement.marker or ""):
            conda[requirement.name.replace("torch", "pytorch")] = requirement.specifier
    assert {Requirement(row).name: Requirement(row).specifier for row in rows} == conda


def test_typed_package_ships_marker_and_stub() -> None:
    assert (ROOT / "commlayer" / "py.typed").exists()
    assert {"ffi", "lib"} <= set(re.findall(r"^(\w+): ", text("commlayer/_native.pyi"), re.MULTILINE))


PINNED = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "requirements").rglob("*.txt"))]


def pins(name: str) -> list[Requirement]:
    return [Requirement(line) for line in text(name).splitlines() if not line.startswith(("#", "-"))]


def test_wheels_are_those_of_the_oldest_python() -> None:
    oldest = metadata.metadata("commlayer")["Requires-Python"].removeprefix(">=3.")
    assert f'"cp3{oldest}-*"' in text("pyproject.toml")
    assert f'{{"py_limited_api": "cp3{oldest}"}}' in text("setup.py")


def test_the_scenarios_are_in_the_wheel() -> None:
    folder = resources.files("commlayer.tools.emulate").joinpath("scenarios")
    assert folder.joinpath("loss1.toml").is_file()
    assert '"tools/emulate/scenarios/*.toml"' in text("pyproject.toml")


@pytest.mark.parametrize("name", PINNED)
def test_every_requirement_is_pinned_once_per_python(name: str) -> None:
    for python in ("3.10", "3.11", "3.12", "3.13"):
        chosen = [p for p in pins(name) if p.marker is None or p.marker.evaluate({"python_version": python})]
        assert len({pin.name for pin in chosen}) == len(chosen)
        assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) for pin in chosen)


def test_pinned_versions_satisfy_the_package() -> None:
    demo = [*pins("requirements/torch.txt"), *pins("requirements/demo.txt")]
    pinned = {pin.name: str(pin.specifier).removeprefix("==") for pin in demo}
    declared = [Requirement(line) for line in metadata.requires("commlayer") or []]
    runtime = [requirement for requirement in declared if requirement.marker is None]
    assert {requirement.name for requirement in runtime} <= set(pinned)
    assert all(pinned[requirement.name] in SpecifierSet(str(requirement.specifier)) for requirement in runtime)


def test_readme_commands_exist() -> None:
    named = set(re.findall(r"^make ([a-z-]+)", text("README.md"), re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_binding_is_the_text_between_the_markers(build: ModuleType) -> None:
    header = "before /* CFFI-BEGIN */ int cl_f(void); /* CFFI-END */ after"
    assert build.binding(header).strip() == "int cl_f(void);"
    with pytest.raises(ValueError, match="CFFI-BEGIN"):
        build.binding("int cl_f(void); /* CFFI-END */")


def test_engine_is_built_without_simulator_and_tests(build: ModuleType, tmp_path: Path) -> None:
    for name in (
        "protocol/packet.c",
        "wire/udp.c",
        "kernels/reduce.c",
        "engine/engine.c",
        "sim/link.c",
        "tests/test_packet.c",
    ):
        (tmp_path / "native" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "native" / name).touch()
    (tmp_path / "native/build.mk").write_text(text("native/build.mk"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        names = [str(path.relative_to("native")) for path in build.sources()]
    assert sorted(names) == ["engine/engine.c", "kernels/reduce.c", "protocol/packet.c", "wire/udp.c"]


def test_every_folder_of_c_is_the_engines_or_known(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    folders = {path.parent.name for path in (ROOT / "native").glob("*/*.c")}
    assert folders - {"sim", "fabric", "tests", "fuzz", "speed"} == set(build.listed("ENGINE_FOLDERS"))


def test_makefile_and_module_compile_alike(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    flags, libraries = build.listed("C_FLAGS"), build.listed("C_LIBS")
    assert "-std=c11" in flags
    module = build.ffibuilder._assigned_source[3]
    assert module["extra_compile_args"][: len(flags)] == flags
    assert module["extra_link_args"] == libraries
    command = ["make", "-n", "-W", "native/engine/engine.c", "build/test/engine/engine.o", "build/test/simulate"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert " ".join(flags) in lines
    assert re.search(rf"-o build/test/simulate .*{re.escape(' '.join(libraries))}$", lines, re.MULTILINE)


def test_a_build_variable_that_is_not_there_is_named(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match="0 lines that begin with `C_FLAG := `"):
        build.listed("C_FLAG")


def test_make_test_and_make_test_slow_run_every_test() -> None:
    makefile = text("Makefile")
    assert "\n\t$(PYTEST) -m 'not slow' tests\n" in makefile.partition("\ntest-python:")[2]
    assert (
        "\n\t$(BIN)/python -m pytest -q --hypothesis-seed=$(DRAW) -m slow tests\n"
        in makefile.partition("\ntest-slow:")[2]
    )


def test_make_torch_runs_the_tests_of_torchs_interfaces() -> None:
    makefile = text("Makefile").replace("\\\n", " ")
    units = re.search(r"^TORCH_UNITS := \$\(addprefix tests/unit/,(.*)\)$", makefile, re.MULTILINE)
    names = re.search(r"^TORCH_PROCESS := \$\(patsubst %,tests/process/test_%\.py,(.*)\)$", makefile, re.MULTILINE)
    assert units is not None
    assert names is not None
    assert [name for name in units[1].split() if not (ROOT / "tests" / "unit" / name).exists()] == []
    files = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "process").glob("test_*.py")}
    of_torch = {
        name for name in files if {"backend", "ddp", "fsdp", "overlap", "pipeline", "tp"} & set(name.split("_"))
    }
    assert of_torch <= set(names[1].split()) <= files
