"""What only few files may know: torch.distributed, and the kind of a device."""

import ast

import pytest

from tests.architecture.sources import PACKAGE, Modules, imported_names, package_of, read_modules

# Besides the two rooms that wrap it: torch's agent, and what that needs to start ranks; a guest of
# a library that asks the default group; and a device whose process groups torch.distributed has.
MAY_IMPORT_TORCH_DISTRIBUTED = {
    "comm.torch_dist",
    "c10d",
    "integrations.lightning.launched_ranks",
    "launch.agent",
    "launch.loopback_rendezvous",
    "testing.device",
}
MAY_ASK_FOR_DEVICE_TYPE = {"comm.streams", "testing.device.cuda_names"}


def foreign_to_torch_distributed(modules: Modules) -> list[str]:
    """Uses of torch.distributed outside the two rooms that wrap it."""
    sentences = []
    for name in sorted(modules):
        if any(f"{name}.".startswith(f"{room}.") for room in MAY_IMPORT_TORCH_DISTRIBUTED):
            continue
        written = set(imported_names(modules[name])) | {
            ast.unparse(node) for node in ast.walk(modules[name]) if isinstance(node, ast.Attribute)
        }
        if any(f"{dotted}.".startswith("torch.distributed.") for dotted in written):
            allowed = " and ".join(sorted(MAY_IMPORT_TORCH_DISTRIBUTED))
            sentences.append(f"{name or PACKAGE} uses torch.distributed; only {allowed} may")
    return sentences


def asks_for_device_type(modules: Modules) -> list[str]:
    """Branches on the kind of a device outside streams.py."""
    sentences = []
    for name in sorted(set(modules) - MAY_ASK_FOR_DEVICE_TYPE):
        for node in ast.walk(modules[name]):
            if isinstance(node, ast.Attribute) and (
                node.attr in {"is_cuda", "is_cpu"}
                or (node.attr == "type" and ast.unparse(node.value).rstrip(")").endswith("device"))
            ):
                asked = ast.unparse(node)
                sentences.append(
                    f"{name or PACKAGE}, line {node.lineno}, asks for {asked}; only streams may"
                )
    return sentences


# --- the project obeys them --------------------------------------------------------------------


def test_only_two_rooms_know_torch_distributed() -> None:
    assert foreign_to_torch_distributed(read_modules()) == []


def test_only_streams_asks_what_kind_of_device_it_has() -> None:
    assert asks_for_device_type(read_modules()) == []


# --- the rules see what they should ------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import TCPStore",
        "import torch\ntorch.distributed.barrier()",
    ],
)
def test_every_use_of_torch_distributed_is_seen(source: str) -> None:
    assert foreign_to_torch_distributed(package_of(comm__run=source)) == [
        "comm.run uses torch.distributed; only c10d and comm.torch_dist and "
        "integrations.lightning.launched_ranks and launch.agent and launch.loopback_rendezvous and "
        "testing.device may"
    ]
    assert foreign_to_torch_distributed(package_of(comm__torch_dist=source)) == []


@pytest.mark.parametrize(
    "asked", ["device.type", "tensor.device.type", "self._device.type", "tensor.is_cuda"]
)
def test_a_question_for_the_kind_of_device_is_named(asked: str) -> None:
    assert asks_for_device_type(package_of(ddp__api=f"x = {asked} == 1")) == [
        f"ddp.api, line 1, asks for {asked}; only streams may"
    ]
    assert asks_for_device_type(package_of(comm__streams=f"x = {asked} == 1")) == []
