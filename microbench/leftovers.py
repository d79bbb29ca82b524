"""What a bench process makes outside of its memory is named after it, so that its parent can remove it after having killed it.

Each name has a part of the mark in it, a random text in the environment that all descendants of the process inherit: so no file
of anybody else is taken for one of these, and none that was there before.
"""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from contextlib import suppress
from multiprocessing import shared_memory
from pathlib import Path

MARK = "RAYCOMM_BENCH_PROCESS"  # environment variable
_PREFIX = "raycomm-bench-"
_SHARED_MEMORY = "/dev/shm"


def scratch_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory of this bench process. What its adapters make elsewhere has to have the directory's name in its own."""
    return tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{_short(os.environ.get(MARK, ''))}-")


def name_shared_memory() -> None:
    """From now on Python names its shared memory after this bench process: for a rival that cannot be told a name."""
    # Not public, and not long: of 14 characters those that remain are random.
    shared_memory._SHM_NAME_PREFIX = f"/{_short(os.environ.get(MARK, ''))}_"  # type: ignore[attr-defined]


def remove(mark: str) -> None:
    """Remove what the processes with that mark have left; they have ended."""
    temporary, short = glob.escape(tempfile.gettempdir()), _short(mark)
    patterns = (f"{temporary}/{_PREFIX}{short}-*", f"{_SHARED_MEMORY}/*{_PREFIX}{short}-*", f"{_SHARED_MEMORY}/{short}_*")
    for path in [Path(name) for pattern in patterns for name in glob.glob(pattern)]:
        with suppress(OSError):
            if path.lstat().st_uid != os.getuid():
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def _short(mark: str) -> str:
    return mark[:8]
