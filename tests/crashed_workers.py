"""How files of tests go on to other workers after one worker has crashed."""

from __future__ import annotations

from contextlib import suppress

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class CrashedWorkers(LoadFileScheduling):
    """Run each test once, also in the file at which a worker crashed.

    xdist 3.8 gives the test at which a worker crashed to the next worker, and hangs at the end of
    the run because it hands out the files that the crashed worker had completed
    (https://github.com/pytest-dev/pytest-xdist/issues/1378).
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Hand a file to a worker. If it has just crashed, ``remove_node`` will hand it on."""
        with suppress(OSError):  # the pipe is closed, and xdist has not read the end of it yet
            super()._assign_work_unit(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Hand out what the worker had not begun, and return the test at which it crashed."""
        files = self.assigned_work[node]
        left = [test for tests in files.values() for test, is_done in tests.items() if not is_done]
        for file, tests in list(files.items()):
            if left and left[0] in tests:
                tests[left[0]] = True
            if all(tests.values()):
                del files[file]
        super().remove_node(node)
        return left[0] if left else None
