"""`python -m microbench.check RESULT.json`: what of a bench result falls short of the targets.

Exit code 0: nothing does. 1: something does, each named on a line. 2: not a result that can be read.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from microbench.document import SchemaError, read
from microbench.targets import judge


def main(result: Annotated[Path, typer.Argument(help="A file written by --json.", metavar="RESULT.json")]) -> None:
    """Lists what falls short of the targets; exits 1 if anything does."""
    try:
        rows = read(result)["rows"]
    except SchemaError as error:
        print(f"{result}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    verdicts = judge(rows)
    short = [verdict for verdict in verdicts if not verdict.must_met]
    for verdict in short:
        print(f"short: {verdict.row}: {verdict.requirement}; measured: {verdict.measured}")
    aims = [verdict for verdict in verdicts if verdict.aim_met is not None]
    reached = sum(bool(verdict.aim_met) for verdict in aims)
    print(f"{len(verdicts) - len(short)} of {len(verdicts)} requirements met, {reached} of {len(aims)} aims reached")
    raise typer.Exit(1 if short else 0)


if __name__ == "__main__":
    typer.run(main)
