"""Executes the notebooks in real kernels.

``python -m tests.notebooks.executing`` stores the outputs of all, or of those that it names.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from echelon.testing.device.native import device_library
from tests.notebooks.running import FOLDER, NAMES, read

_CELL_TIMEOUT_S = 60


def executed(name: str) -> Any:
    """The notebook with the outputs of a run, without what changes from run to run.

    Raises:
        CellExecutionError: a cell raised.
    """
    notebook = read(name)
    if any("simulated_device" in cell.source for cell in notebook.cells):
        device_library()  # compiled, before cells are timed and what they say is stored
    with tempfile.TemporaryDirectory() as folder:
        # Sockets in a folder need no port; settings of the user are left out.
        apart = {"IPYTHONDIR": folder, "JUPYTER_RUNTIME_DIR": folder, "OMP_NUM_THREADS": "1"}
        manager = KernelManager(kernel_name="python3", transport="ipc", ip=f"{folder}/ipc")
        with mock.patch.dict(os.environ, apart):
            client = NotebookClient(
                notebook,
                km=manager,
                timeout=_CELL_TIMEOUT_S,
                coalesce_streams=True,
                record_timing=False,
                resources={"metadata": {"path": str(FOLDER)}},
            )
            try:
                client.execute()
            finally:
                if client.kc is not None:
                    client.kc.stop_channels()
                if manager.has_kernel:
                    manager.shutdown_kernel(now=True)
                manager.cleanup_resources()
    notebook.metadata["language_info"] = {"name": "python"}  # without the version of Python
    return notebook


def outputs(notebook: Any) -> list[Any]:
    """What the cells show, without the digits of rounding errors, which depend on the processor."""
    shown = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    text = json.dumps(shown, ensure_ascii=False)
    return json.loads(re.sub(r"\d\.\de-1[3-9]|0\.0e\+00", "0", text))


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        nbformat.write(executed(name), Path(FOLDER) / f"{name}.ipynb")
        print(name)
