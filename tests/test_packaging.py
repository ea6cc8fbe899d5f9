"""What is published: a wheel and a source distribution with what runs need and nothing else; licence and citation."""

import importlib.util
import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import jaxtrain

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Endings of files that are no Python and that the package reads when it runs, or that tools read.
READ = {".yaml", ".html", ".txtpb", ".typed", ".pyi"}
# The wheel holds 3.9 MB of Python, 1.4 MB as it is compressed; more would be a file that was left there.
MOST_BYTES = 3_000_000


def tracked(folder: str) -> set[str]:
    """Files of a folder that git knows; `configs/` under the name that it is installed by."""
    done = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_citation_is_of_this_version_and_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the source distribution, and the wheel that is built of it; from a copy of what git knows."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("pip install build")
    source, out = tmp_path_factory.mktemp("source") / "jaxtrain", tmp_path_factory.mktemp("dist")
    files = sorted(tracked("."))
    for name in files:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    words = ["-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, cwd=out)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.mark.long
def test_the_wheel_holds_what_runs_need_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        said = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert f"\nVersion: {jaxtrain.__version__}\n" in said
    package = {name for name in names if name.startswith("jaxtrain/")}
    configs = {f"jaxtrain/{name}" for name in tracked("configs")}
    wanted = {name for name in tracked("jaxtrain") if Path(name).suffix in READ | {".py"}} | configs
    assert package == wanted
    others = {name.split("/", 1)[1] for name in names - package}
    assert {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"} <= others
    assert wheel.stat().st_size < MOST_BYTES


@pytest.mark.long
def test_the_source_distribution_builds_the_wheel_and_holds_no_tests(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", "jaxtrain/py.typed"} <= names
    assert {f"jaxtrain/{name}" for name in tracked("configs")} <= names
    assert [name for name in names if name.startswith(("tests", "docs", "build/")) or "__pycache__" in name] == []
    assert path.stat().st_size < MOST_BYTES


@pytest.mark.long
def test_the_installed_wheel_trains_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    """In an environment that has what jaxtrain needs, but not this checkout."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    # Packages of this environment, after those of the new one: nothing is downloaded.
    (site / "needed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel]
    subprocess.run(install, check=True, timeout=120)
    work = tmp_path / "work"
    work.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")}

    def call(*words: str) -> str:
        program = folder / "bin" / "jaxtrain"
        done = subprocess.run([program, *words], cwd=work, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "train" in call("--help")
    assert "quickstart" in call("config")
    assert "fits" in call("plan", "llama3_8b", "--on", "h100x8", "--analytic")  # reads the catalogue
    call("train", "digits_mlp", "train.steps=2", "evaluation.every=null")
    assert (work / "runs" / "digits_mlp" / "report.html").is_file()
    shown = "import jaxtrain; print(jaxtrain.__file__)"
    found = subprocess.run([python, "-c", shown], cwd=work, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(folder))
