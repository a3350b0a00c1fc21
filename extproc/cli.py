"""The command line: extproc serve | check-config | envoy-config | explain | simulate | replay."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import extproc
from extproc import config as configuration
from extproc import explain, log
from extproc.envoy_config import render, render_secrets
from extproc.service import Service

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.config import Config


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed, 2 wrong usage or configuration."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except configuration.ConfigError as error:
        print(*error.errors, sep="\n", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `extproc check-config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="extproc", description=extproc.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, text in (
        ("serve", _serve, "run the external processor"),
        ("check-config", _check, "validate a configuration and print it with all defaults"),
        ("envoy-config", _envoy, "print the Envoy bootstrap that goes with a configuration"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--config", metavar="FILE", type=Path, help="TOML; EXTPROC_SECTION__KEY overrides it")
        command.set_defaults(run=run)
        if run is _serve:
            command.add_argument("--workers", metavar="N", help="as server.workers: processes that read requests")
        if run is _envoy:
            command.add_argument(
                "-o", "--output", metavar="FILE", type=Path, help="write it there, and TLS secrets beside it"
            )
    explain.add_parser(commands)
    # By name: the simulator knows both sides of a fleet, and this package is to know nothing of the other.
    for verb in ("sim.cli", "sim.replay"):
        import_module(verb).add_parser(commands)
    return parser


def _serve(args: argparse.Namespace) -> int:
    if args.workers is not None:
        os.environ[f"{configuration.PREFIX}SERVER__WORKERS"] = args.workers  # where a reload finds it, too
    config = configuration.load(args.config)
    log.configure()
    try:
        asyncio.run(_run(config, args.config))
    except (OSError, RuntimeError) as error:  # a port that is taken
        print(f"extproc: {error}", file=sys.stderr)
        return 1
    return 0


async def _run(config: Config, path: Path | None) -> None:
    await Service(config, path).run()


def _check(args: argparse.Namespace) -> int:
    print(configuration.to_json(configuration.load(args.config)))
    return 0


def _envoy(args: argparse.Namespace) -> int:
    config = configuration.load(args.config)
    secrets = render_secrets(config.envoy)
    if secrets and args.output is None:
        raise configuration.ConfigError(["envoy.router_tls_ca: secrets are files of their own; name one with -o"])
    configuration.check_both_ends(config)
    directory = args.output.resolve().parent if args.output is not None else Path()
    bootstrap = render(
        config.envoy,
        config.server.listen,
        config.features,
        config.telemetry.sample_ratio,
        directory,
    )
    if args.output is None:
        print(bootstrap, end="")
        return 0
    args.output.write_text(bootstrap, encoding="utf-8")
    for name, secret in secrets.items():
        (directory / name).write_text(secret, encoding="utf-8")
    return 0
