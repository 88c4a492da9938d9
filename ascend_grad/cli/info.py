"""The command ``ascend-grad info``: shows this installation and the hardware that it found."""

from __future__ import annotations

import argparse
import json
from typing import Any

import ascend_grad as ag

from .exit_statuses import exit_statuses

SUMMARY = "show the version, the CPU variant, threads and backends"
DESCRIPTION = """\
Show the version and build of this installation, and the hardware that it found. The command takes less than a second
and writes no file.
"""
EPILOG = ""
STATUSES = exit_statuses("always, unless printing fails")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="also show a device's libraries and operators, or where they were searched for",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    config: Any = ag.show_config(mode="dict")
    if args.json:
        print(json.dumps(config, indent=2))
        return 0
    version, cpu = config["version"], config["cpu"]
    print(f"ascend_grad   {version['ascend_grad']}")
    print(f"built with    {version['compiler']}")
    print(f"running on    Python {version['python']}, NumPy {version['numpy']}")
    print(f"system        {config['system']}")
    print(f"CPU           {cpu['model']}, {cpu['cores']} cores")
    print(f"CPU variant   {cpu['variant']} (this machine supports {', '.join(cpu['supported'])})")
    for remark in cpu["remarks"]:
        print(f"              {remark}")
    print(f"OpenMP        {config['openmp']}")
    print(f"threads       {config['threads']}")
    print(f"C headers     {ag.get_include()}")
    for name, value in config["environment"].items():
        print(f"environment   {name}={value}")
    for name, status in config["backends"].items():
        print(f"backend       {name}: {'usable' if status['usable'] else 'not usable'}, {status['reason']}")
        for line in status["details"].splitlines() if args.verbose else ():
            print(f"              {line}")
    return 0
