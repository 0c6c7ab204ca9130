"""Hosts are imported only by their guests."""

import subprocess
import sys

HOSTS = ("lightning", "accelerate", "transformers", "ray", "peft", "datasets", "wandb", "mlflow")


def test_no_host_is_imported_with_the_library() -> None:
    program = (
        "import sys, echelon, echelon.integrations\n"
        "for name in echelon.__all__:\n    getattr(echelon, name)\n"
        f"print(sorted(set({HOSTS!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
