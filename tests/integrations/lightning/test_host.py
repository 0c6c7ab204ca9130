"""Lightning is imported only by its guest."""

import subprocess
import sys


def test_lightning_is_not_imported_with_the_library() -> None:
    program = (
        "import sys, echelon, echelon.integrations\n"
        "for name in echelon.__all__:\n    getattr(echelon, name)\n"
        "print({'lightning', 'torchmetrics'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr
