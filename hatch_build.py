"""Compiles with mypyc what every request passes through, while a wheel is built and where that is asked for.

A hook of the wheel (pyproject.toml) that is off by default: HATCH_BUILD_HOOK_ENABLE_CUSTOM=true turns it on, and a
wheel without it is pure Python. The compiled modules lie beside their sources, and Python imports them first.
"""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PATTERNS = (
    "admin/decisions.py",
    "admin/history.py",
    "core/*.py",
    "http2/*.py",
    *(
        "call.py",
        "exchange.py",
        "messages.py",
        "observers.py",
        "picker.py",
        "plain_messages.py",
        "services.py",
        "wire.py",
    ),
    "workers/link.py",
)
INTERPRETED = {"__init__.py", "settings.py", "listener.py"}
"""pydantic fills in settings, and takes compiled classes for ones with a __dict__. A listener's peers are protocols of
asyncio's, which compiled classes cannot derive from."""


def sources(root: Path) -> list[Path]:
    """What is compiled, relative to the checkout."""
    found = sorted(path for pattern in PATTERNS for path in (root / "extproc").glob(pattern))
    return [path.relative_to(root) for path in found if path.name not in INTERPRETED]


class CompileHook(BuildHookInterface[Any]):
    """Puts the compiled modules into the wheel, and the name of this Python and platform on it."""

    def dependencies(self) -> list[str]:
        return ["mypy[mypyc]>=1.16"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # runs from the checkout, where a compiled module would outlive its source
            return
        with chdir(self.root):
            built = compile_extproc(Path("build", "mypyc"))
            build_data["force_include"].update({str(path.resolve()): name for name, path in built.items()})
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def compile_extproc(directory: Path) -> dict[str, Path]:
    """Compile in the checkout, the working directory. `directory` is kept, so that only what changed is built again.

    Returns path within the wheel -> file.
    """
    # Both are there only while a compiled wheel is built.
    from mypyc.build import mypycify  # noqa: PLC0415
    from setuptools import Distribution  # noqa: PLC0415
    from setuptools.command.build_ext import build_ext  # noqa: PLC0415

    extensions = mypycify(
        ["--cache-dir", str(directory / "cache"), *map(str, sources(Path()))],
        target_dir=str(directory / "c"),
        group_name="extproc",
        debug_level="0",
    )
    build = build_ext(Distribution({"name": "extproc", "ext_modules": extensions}))
    build.build_lib, build.build_temp = str(directory / "lib"), str(directory / "objects")
    build.ensure_finalized()
    build.run()
    return {str(Path(path).relative_to(build.build_lib)): Path(path) for path in build.get_outputs()}
