"""The jobs of docs/kubernetes.md and docs/skypilot.md; each pod or node is a process here."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import echelon as ec
from tests.documented_jobs import (
    DOCS,
    RANKS,
    SAVE_EVERY,
    STEPS,
    blocks,
    environ_of_job,
    started_job,
)
from tests.processes import free_port, wait_until

RUNTIME, TRAIN_JOB = yaml.safe_load_all(blocks("kubernetes.md", "yaml")[0])
PYTORCH_JOB = yaml.safe_load(blocks("kubernetes.md", "yaml")[1])
SKY_NODES, SKY_NODE = (yaml.safe_load(block) for block in blocks("skypilot.md", "yaml"))
JOB_OF_PODS = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
MASTER, WORKER = (
    PYTORCH_JOB["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"]
    for role in ("Master", "Worker")
)
# By the exit code of a pod that is to be started again.
PODS = {75: TRAIN_JOB["spec"]["trainer"], 138: MASTER["containers"][0]}


@contextmanager
def nodes(
    folder: Path, command: list[str], variables: list[Mapping[str, str]]
) -> Iterator[list[subprocess.Popen[str]]]:
    """The same command for each node, with variables of its own, in a folder that all see."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                started_job(command, folder, environ_of_job(GLOO_SOCKET_IFNAME="lo", **own))
            )
            for own in variables
        ]


def pods(folder: Path, container: Mapping[str, Any]) -> Any:
    """Two pods with one rank each, as the operators describe them to torchrun."""
    (script,) = container["args"]
    script, number = re.subn(r"/tmp/stderr", r"$PET_NODE_RANK.stderr", script)
    assert number == 2
    port = str(free_port())
    common = {"PET_NNODES": str(RANKS), "PET_NPROC_PER_NODE": "1", "PET_MASTER_PORT": port}
    common |= {"PET_MASTER_ADDR": "127.0.0.1"}
    common |= {variable["name"]: variable["value"] for variable in container["env"]}
    return nodes(
        folder,
        [*container["command"], script],
        [{**common, "PET_NODE_RANK": str(node)} for node in range(RANKS)],
    )


def test_a_pod_that_asks_to_be_started_again_counts_no_failure() -> None:
    rules = JOB_OF_PODS["podFailurePolicy"]["rules"]
    (container,) = JOB_OF_PODS["template"]["spec"]["containers"]
    codes = next(rule["onExitCodes"] for rule in rules if "onExitCodes" in rule)
    assert codes == {"containerName": container["name"], "operator": "In", "values": [75]}
    assert {rule["action"] for rule in rules} == {"Ignore"}
    assert JOB_OF_PODS["template"]["spec"]["restartPolicy"] == "Never"  # which the policy needs
    assert TRAIN_JOB["spec"]["runtimeRef"]["name"] == RUNTIME["metadata"]["name"]
    assert SKY_NODE["resources"]["job_recovery"]["recover_on_exit_codes"] == [ec.EXIT_RESUMABLE]


def test_both_roles_of_a_pytorchjob_are_one_pod_and_restart_by_exit_code() -> None:
    assert MASTER == WORKER
    for role in PYTORCH_JOB["spec"]["pytorchReplicaSpecs"].values():
        assert role["restartPolicy"] == "ExitCode"
    assert MASTER["containers"][0]["name"] == "pytorch"  # the operator looks for it


def test_pods_are_killed_after_their_ranks_have_had_time_to_save() -> None:
    counted = {int(text) for text in re.findall(r"grace_s=(\d+)", (DOCS / "resume.md").read_text())}
    for spec, container in (
        (JOB_OF_PODS["template"]["spec"], PODS[75]),
        (MASTER, PODS[138]),
    ):
        (variable,) = container["env"]
        assert variable["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        assert spec["terminationGracePeriodSeconds"] > int(variable["value"]) >= max(counted)


@pytest.mark.slow
@pytest.mark.parametrize("code", PODS)
@pytest.mark.parametrize("stopped", range(RANKS))
def test_all_pods_exit_to_be_started_again_when_one_has_to_go(
    stopped: int, code: int, tmp_path: Path
) -> None:
    with pods(tmp_path, PODS[code]) as processes:
        wait_until(lambda: ec.steps(tmp_path / "runs" / "a"), *processes)
        processes[stopped].send_signal(signal.SIGTERM)  # to the shell, as to process 1 of a pod
        for process in processes:
            _, errors = process.communicate(timeout=90)
            assert process.returncode == code, errors
    assert SAVE_EVERY <= ec.steps(tmp_path / "runs" / "a")[-1] < STEPS


@pytest.mark.slow
def test_a_pod_whose_script_fails_keeps_its_exit_code(tmp_path: Path) -> None:
    with pods(tmp_path, PODS[75]) as processes:
        (tmp_path / "train.py").write_text("raise SystemExit(3)")
        for process in processes:
            _, errors = process.communicate(timeout=90)
            assert process.returncode == 1, errors


@pytest.mark.slow
def test_the_nodes_of_skypilot_train_together(tmp_path: Path) -> None:
    port = str(free_port())
    assert "--master-port 29500" in SKY_NODES["run"]
    command = SKY_NODES["run"].replace("29500", port)
    common = {"SKYPILOT_NUM_NODES": str(RANKS), "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    common |= {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
    variables = [{**common, "SKYPILOT_NODE_RANK": str(node)} for node in range(RANKS)]
    with nodes(tmp_path, ["bash", "-c", command], variables) as processes:
        for process in processes:
            _, errors = process.communicate(timeout=100)
            assert process.returncode == 0, errors
    assert ec.steps(tmp_path / "runs" / "a")[-1] == STEPS


@pytest.mark.slow
def test_one_node_of_skypilot_runs_echelon(tmp_path: Path) -> None:
    variables = [{"SKYPILOT_NUM_GPUS_PER_NODE": str(RANKS)}]
    with nodes(tmp_path, ["bash", "-c", f"exec {SKY_NODE['run']}"], variables) as (process,):
        wait_until(lambda: ec.steps(tmp_path / "runs" / "a"), process)
        process.send_signal(signal.SIGUSR1)
        _, errors = process.communicate(timeout=90)
        assert process.returncode == ec.EXIT_RESUMABLE, errors
