"""What is made of Ray's texts."""

from __future__ import annotations

import pytest

from raycomm.runtime.ray_errors import Death

FACTS = "\tclass_name: W\n\tactor_id: 74b3\n\tpid: 2843\n{}\tnamespace: 4ec9\n\tip: 192.0.2.2\n"
BEGIN = "The actor died unexpectedly before finishing this task.\n"


@pytest.mark.parametrize(
    ("text", "cause", "who"),
    [
        (
            BEGIN + FACTS.format("") + "The actor is dead because it was killed by `ray.kill`.",
            "The actor is dead because it was killed by `ray.kill`.",
            " (pid 2843)",
        ),
        (
            BEGIN
            + FACTS.format("\tname: a: b\n")
            + "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
            "unexpectedly exits. End of file. Some common causes include: (1) the OOM killer. (2) more\nThe actor never ran.",
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
            "unexpectedly exits. End of file.\nThe actor never ran.",
            " (named 'a: b', pid 2843)",
        ),
        (
            BEGIN + FACTS.format("") + "The actor died because its node has died. Node Id: 1\n\tthe node was terminated",
            "The actor died because its node has died. Node Id: 1\nthe node was terminated",
            " (pid 2843)",
        ),
        (BEGIN + FACTS.format(""), BEGIN + FACTS.format(""), " (pid 2843)"),
        (BEGIN, BEGIN, ""),
        (
            "The actor died because of an error in its creation task\n  File 'x', line 1\n    fail()\nValueError: no",
            "The actor died because of an error in its creation task\n  File 'x', line 1\n    fail()\nValueError: no",
            "",
        ),
        ("it ended during set-up", "it ended during set-up", ""),
    ],
)
def test_the_cause_of_a_death(text: str, cause: str, who: str) -> None:
    death = Death.told_by(text)
    assert (death.cause, death.who) == (cause, who)
