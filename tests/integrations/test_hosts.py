"""Hosts are imported only by those who ask for them."""

import subprocess
import sys

from tests.children import environ

HOSTS = ("ray", "wandb", "mlflow", "trackio", "tensorboard")


def test_no_host_is_imported_by_the_library_and_its_rooms() -> None:
    rooms = "checkpoint.api, echelon.cli, echelon.fsdp, echelon.integrations, echelon.observe"
    code = f"import sys, echelon.{rooms}; print([host for host in {HOSTS} if host in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environ(), capture_output=True, text=True, timeout=100
    )
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr
