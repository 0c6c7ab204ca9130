"""The variables of torchrun, as a rank finds them that echelon has started."""

from __future__ import annotations

import os

from echelon.comm.world import DEFAULT_TIMEOUT_S


def rank_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets for a rank of one host.

    Args:
        port: at which programs believe the store to be.

    Example:
        >>> rank_variables(1, 4, 29500)["LOCAL_RANK"]
        '1'
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "ROLE_NAME": "rank",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "echelon",
    }


def timeout_variable(timeout: float) -> dict[str, str]:
    """What lets groups of torch without a timeout of their own wait as long as the world does.

    Args:
        timeout: seconds; what the user has set in the environment is more than our default.
    """
    if timeout == DEFAULT_TIMEOUT_S and os.environ.get("ECHELON_TIMEOUT"):
        return {}
    return {"ECHELON_TIMEOUT": f"{timeout:g}"}
