"""A rank that is a process takes over the state that fixtures have given the process of pytest."""

import logging
import os
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from echelon.laboratory.caller_state import CallerState
from echelon.launch import function_pickle


def test_all_of_the_state_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECHELON_TEST_OF_STATE", "set")
    level, dtype = logging.getLogger().level, torch.get_default_dtype()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no such thing", FutureWarning)
        logging.getLogger().setLevel(logging.INFO)
        torch.set_default_dtype(torch.float64)
        state = function_pickle.loads(function_pickle.dumps(CallerState.take()))
        drawn = (torch.rand(1), random.random(), np.random.rand())
        torch.set_default_dtype(dtype)
        logging.getLogger().setLevel(level)
    monkeypatch.undo()
    environment = dict(os.environ)
    with warnings.catch_warnings():
        try:
            state.restore()
            assert Path.cwd() == tmp_path
            assert os.environ["ECHELON_TEST_OF_STATE"] == "set"
            assert logging.getLogger().level == logging.INFO
            assert (torch.rand(1), random.random(), np.random.rand()) == drawn
            assert torch.get_default_dtype() == torch.float64
            with pytest.raises(FutureWarning):
                warnings.warn("no such thing", FutureWarning, stacklevel=1)
        finally:
            torch.set_default_dtype(dtype)
            logging.getLogger().setLevel(level)
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(Path(__file__).parent.parent.parent)
