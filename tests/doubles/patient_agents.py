"""Runs the example's agents with 1000 retries: `python patient_agents.py FOLDER URL`.

They open no rollout while `FOLDER/hold` exists. Each opening under way has a file `FOLDER/opening-*`.
"""

import functools
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

import openai

FOLDER = Path(sys.argv.pop(1))
HOLD = FOLDER / "hold"


class PatientClient(openai.OpenAI):
    def post(self, path: str, **request: Any) -> Any:
        if path != "/r":
            return super().post(path, **request)
        opening = FOLDER / f"opening-{threading.get_ident()}"
        opening.touch()
        while HOLD.exists():
            opening.unlink(missing_ok=True)
            time.sleep(0.01)
            if not HOLD.exists():
                opening.touch()
        try:
            return super().post(path, **request)
        finally:
            opening.unlink()


openai.OpenAI = functools.partial(PatientClient, max_retries=1000)
runpy.run_path("docs/examples/outside_agent.py", run_name="__main__")
