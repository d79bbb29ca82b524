"""One step in this process: ``python -m tests.gpu.step MODULE:FUNCTION SETTING RESULT``, started by `suite`."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.gpu.setting import Setting, StepFailed, StepSkipped


def outcome(entry: str, setting: Setting) -> dict[str, Any]:
    """Run the step; what came of it."""
    module, _, function = entry.partition(":")
    try:
        figures = getattr(importlib.import_module(module), function)(setting)
    except StepSkipped as skipped:
        return {"state": "skipped", "reason": str(skipped)}
    except StepFailed as failed:
        return {"state": "failed", "reason": str(failed), "figures": failed.figures}
    except Exception as error:
        traceback.print_exc()
        return {"state": "failed", "reason": f"{type(error).__name__}: {error}"}
    return {"state": "ok", "figures": figures}


def main() -> None:
    """What came of the step goes to the file RESULT, whole or not at all."""
    entry, setting, result = sys.argv[1:]
    text = json.dumps(outcome(entry, Setting.of_text(setting)))
    part = Path(result).with_suffix(".part")
    part.write_text(text)
    part.rename(result)


if __name__ == "__main__":
    main()
