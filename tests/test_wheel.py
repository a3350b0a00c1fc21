"""The wheel: what `pip install` brings, apart from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from extproc import config as configuration
from extproc.envoy_config import render

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, unpacked; built from what the image builds it from."""
    directory = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source")
    for name in _copied_by_the_image():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", directory],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "site-packages")
    return directory / "site-packages"


def _copied_by_the_image() -> list[str]:
    stage, _, _ = (ROOT / "Dockerfile").read_text(encoding="utf-8").partition("pip wheel")
    return [name for line in stage.splitlines() if line.startswith("COPY ") for name in line.split()[1:-1]]


def test_it_renders_the_bootstrap_by_itself(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = "import sys, extproc; print(extproc.__file__); from extproc.cli import main; sys.exit(main())"
    ran = subprocess.run(
        [sys.executable, "-c", command, "envoy-config"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    origin, _, bootstrap = ran.stdout.partition("\n")
    assert Path(origin).is_relative_to(installed)
    config = configuration.load(None, {})
    assert bootstrap == render(config.envoy, config.server.listen, config.features)
    assert (installed / "extproc" / "_envoy" / "bootstrap.yaml").read_bytes() == (
        ROOT / "envoy" / "bootstrap.yaml"
    ).read_bytes()


def test_it_holds_the_product_alone(installed: Path) -> None:
    packages = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert packages == {"extproc", "serve_app", "sim"}
    (info,) = installed.glob("*.dist-info")
    assert "extproc = extproc.cli:main" in (info / "entry_points.txt").read_text(encoding="utf-8")


def test_it_holds_the_live_page(installed: Path) -> None:
    page = Path("extproc") / "admin" / "web"
    held = {path.name: path.read_bytes() for path in (installed / page).iterdir()}
    assert held == {path.name: path.read_bytes() for path in (ROOT / page).iterdir()}
    assert "page.html" in held
