"""The two-rank exchange as a program: refused, hanging, or right."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from dags import exchange

app = typer.Typer()
app.command()(exchange.main)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


@pytest.mark.parametrize("policy", ["link", "direction"])
def test_streams_of_their_own_exchange_the_right_values(policy: str) -> None:
    code, output = run("--policy", policy, "--executions", "20")
    assert code == 0
    for execution in range(20):
        assert "; ".join(exchange.expected(execution)) in output


def test_a_shared_stream_is_refused_with_the_circle() -> None:
    code, output = run("--policy", "shared")
    assert code == exchange.DEADLOCK
    assert "DeadlockError" in output
    assert "rank0: send 1 from r1 on link 0 stream 1 with rank1: r2 = recv 1 on link 0 stream 1" in output
    assert "stream policy 'link'" in output


def test_a_shared_stream_hangs_where_it_is_not_refused() -> None:
    code, output = run("--policy", "shared", "--no-verify")
    assert code == exchange.HANG
    assert "stream 1 of rank0: send of channel 1 to rank1 on link 0 waits for rank1 to receive channel 1" in output
    assert "execution 0" not in output
