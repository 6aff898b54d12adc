"""The linked folders are in the installed package, and shadow nobody else's packages."""

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
LINKED = ("adapters", "kernels", "recipes")


def python(code, folder, **environment):
    """The standard output of ``code`` run by this interpreter in ``folder``, with nothing inherited on its path."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the sources; a build in place would take over what an earlier one left in build/."""
    folder = tmp_path_factory.mktemp("source") / "repository"
    ignore = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "runs", "outputs")
    shutil.copytree(REPOSITORY, folder, symlinks=True, ignore=ignore)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """The wheel that pip builds from the copy."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        source,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel's files, as a folder to put on the path."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def sources(folder, *suffixes):
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix in suffixes and "__pycache__" not in path.parts
    }


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(source, wheel):
    """Catches adapters, kernels, recipes or a YAML file left out of the wheel, and tests or caches left in."""
    expected = {f"ep_plugin/{name}" for name in sources(source / "ep_plugin", ".py", ".yaml")}
    for name in LINKED:
        expected |= {f"ep_plugin/{name}/{path}" for path in sources(source / name, ".py", ".yaml")}
    assert "ep_plugin/recipes/config.yaml" in expected
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected


@pytest.mark.slow
def test_every_console_command_has_its_code(installed):
    """Catches a command declared for a module or function that is not there."""
    commands = configparser.ConfigParser()
    assert commands.read(next(installed.glob("*.dist-info")) / "entry_points.txt")
    assert {"ep-plugin", "ep-bench", "ep-topology"} <= set(commands["console_scripts"])
    for command, target in commands["console_scripts"].items():
        module, function = target.split(":")
        code = (installed / (module.replace(".", "/") + ".py")).read_text()
        assert f"\ndef {function}(" in code, f"{command} needs {function} in {module}"


@pytest.mark.slow
def test_another_application_composes_our_recipes_from_the_wheel(installed, tmp_path):
    """Catches recipes that only work from the repository's root or with our own main config."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "main.yaml").write_text(
        "defaults: [{ep: block}, _self_]\nhydra: {searchpath: [pkg://ep_plugin.recipes]}\nlr: 0.1\n"
    )
    code = """
import ep_plugin, hydra, os
assert ep_plugin.__file__.startswith(os.environ["PYTHONPATH"]), ep_plugin.__file__
with hydra.initialize_config_dir(os.getcwd() + "/conf", version_base="1.3"):
    for name in ("block", "rowwise"):
        config = hydra.compose("main", overrides=[f"ep={name}"])
        print(config.lr, config.ep.dispatcher)
"""
    assert python(code, tmp_path, PYTHONPATH=str(installed)) == "0.1 block\n0.1 rowwise"


@pytest.mark.slow
def test_every_module_of_the_wheel_is_imported_under_its_name(installed, tmp_path):
    """Catches a module of a linked folder that imports another by its name at the top level."""
    modules = [
        "ep_plugin." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in sorted(sources(installed / "ep_plugin", ".py"))
        if path != "__init__.py" and not path.endswith("__main__.py")
    ]
    code = f"import importlib\nfor name in {modules!r}: importlib.import_module(name)"
    python(code, tmp_path, PYTHONPATH=str(installed))


def test_the_editable_install_serves_every_folder(tmp_path):
    """Catches links that are resolved only when the working directory is the repository."""
    code = "import ep_plugin.adapters, ep_plugin.kernels, ep_plugin.recipes as r; print(r.__name__)"
    assert python(code, tmp_path) == "ep_plugin.recipes"


@pytest.mark.slow
def test_transformers_is_imported_from_the_repositorys_root():
    """Catches adapters/ or kernels/ taken for the published packages of those names, which transformers looks for."""
    pytest.importorskip("transformers")
    for name in ("adapters", "kernels"):
        assert not (REPOSITORY / name / "__init__.py").exists()
    code = "import transformers; from transformers import OlmoeForCausalLM as m; print(m.__name__)"
    assert python(code, REPOSITORY, HF_HUB_OFFLINE="1") == "OlmoeForCausalLM"


def test_links_are_relative():
    """Catches a link that points into the checkout of whoever made it."""
    for name in LINKED:
        link = REPOSITORY / "ep_plugin" / name
        assert link.is_symlink() and link.readlink() == Path("..") / name
