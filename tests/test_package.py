"""What is released: a wheel and an sdist hold all of the package, with its data, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import shardwright

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "shardwright"
BUILD = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"
MADE_BY_RUNNING = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both, built from a copy as `pip wheel` builds them, without the network."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT / "src", folder / "src", ignore=MADE_BY_RUNNING)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=MADE_BY_RUNNING)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "dist"


def everything() -> set[str]:
    files = (path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {f"shardwright/{path.relative_to(SOURCE)}" for path in files}


def test_the_wheel_holds_the_package_and_its_data(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    about = [name for name in names if name.startswith(f"shardwright-{shardwright.__version__}.dist-info/")]
    assert set(names) - set(about) == everything()
    assert any(name.endswith("/licenses/LICENSE") for name in about)


def test_the_wheel_says_what_it_needs(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    about = f"shardwright-{shardwright.__version__}.dist-info"
    said = zipfile.ZipFile(wheel).read(f"{about}/METADATA").decode()
    assert f"\nVersion: {shardwright.__version__}\n" in said
    assert "\nRequires-Python: >=3.10\n" in said
    for extra in ("hf", "trainer", "accelerate", "lightning"):
        assert f"\nProvides-Extra: {extra}\n" in said
    assert "shardwright = shardwright.cli:main" in zipfile.ZipFile(wheel).read(f"{about}/entry_points.txt").decode()


def test_the_sdist_holds_what_the_wheel_is_made_of(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in everything()} <= names
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"} <= names
    assert not any(name.startswith(("tests", "bench", "docs")) for name in names)
