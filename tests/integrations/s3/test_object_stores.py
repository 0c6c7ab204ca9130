"""Checkpoints in a bucket, by ranks that are processes: a server of S3 runs in this process."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from moto.server import ThreadedMotoServer
from torch import Tensor, nn

import echelon as ec
from echelon.checkpoint.store_path import StorePath, Upload
from echelon.comm.world import World
from echelon.errors import CheckpointError, RankFailed
from tests.worlds import run_world

s3fs = pytest.importorskip("s3fs")

OPTIONS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
RUN = "s3://bucket/runs/a"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The file system of a store with one empty bucket."""
    for name, value in {**OPTIONS, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    system = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    system.mkdir("bucket")
    yield system
    for path in system.find("bucket"):
        system.rm_file(path)
    system.rmdir("bucket")


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def trains(world: World, env: dict[str, str], first: int, last: int, kill: bool) -> list[Tensor]:
    """Go on from the newest step, if there is one; perhaps die inside of the last save."""
    os.environ.update(env)
    model = ec.FSDP(model_of(0), world.group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    start = ec.load(RUN, **parts).step if ec.steps(RUN) else 0
    assert start == first
    for step in range(start + 1, last + 1):
        torch.manual_seed(step)
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if kill and step == last:
            dies_in_upload(after=world.rank == 0)
        ec.save(RUN, step=step, **parts)
    with model.full_parameters():
        return [param.detach().clone() for param in model.parameters()]


def dies_in_upload(*, after: bool) -> None:
    """Kill this process at the end of its next upload, before or after the file is there."""
    end = Upload.__exit__

    def die(self: Upload, *error: Any) -> None:
        if after:
            end(self, *error)
        os.kill(os.getpid(), signal.SIGKILL)

    Upload.__exit__ = die  # type: ignore[method-assign]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def test_a_job_that_is_killed_in_an_upload_continues_on_other_numbers_of_ranks(bucket: Any) -> None:
    env = environment()
    with pytest.raises(RankFailed):
        run_world("processes", trains, 2, (env, 0, 3, True))
    assert ec.steps(RUN) == [1, 2]
    partial = bucket.find(f"{RUN}/step-000000003")
    assert partial
    run_world("gloo", trains, 3, (env, 2, 3, False))
    stored = ec.run(trains, 1, args=(env, 3, 5, False))[0]
    assert ec.steps(RUN) == [1, 2, 3, 4, 5]
    for path in bucket.find("bucket"):
        bucket.rm_file(path)
    at_once = ec.run(trains, 1, args=(env, 0, 5, False))[0]
    for one, other in zip(stored, at_once, strict=True):
        torch.testing.assert_close(one, other)  # sums over 3 ranks have another order


def test_a_large_file_is_sent_in_parts_and_appears_whole_or_not_at_all(bucket: Any) -> None:
    model = nn.Linear(2000, 3500, bias=False)  # 28 MB
    system = s3fs.S3FileSystem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system, "default_block_size", 5 << 20)
        patch.setattr(s3fs.S3File, "part_min", 5 << 20)
        ec.save(RUN, step=1, model=model)
        keys = bucket.find("bucket/runs/a/step-000000001")  # each with a name of its upload
        (key,) = (key for key in keys if key.endswith(".safetensors"))
        assert "-" in bucket.info(key)["ETag"]  # of an upload in parts
        with (
            pytest.raises(RuntimeError, match="in the middle"),
            Upload(StorePath(f"{RUN}/x")) as up,
        ):
            up.write(memoryview(bytes(12 << 20)))
            raise RuntimeError("in the middle")
    assert not bucket.exists(f"{RUN}/x")
    assert bucket.list_multipart_uploads("bucket") == []
    loaded = nn.Linear(2000, 3500, bias=False)
    ec.load(RUN, model=loaded)
    assert torch.equal(loaded.weight, model.weight)


def fails(world: World, env: dict[str, str], url: str) -> tuple[str, float]:
    os.environ.update(env)
    model = ec.DDP(model_of(0), world.group)
    start = time.monotonic()
    with pytest.raises(CheckpointError) as info:
        ec.save(url, step=1, model=model)
    return str(info.value), time.monotonic() - start


@pytest.mark.parametrize(
    ("change", "url", "message"),
    [
        ({}, "s3://nowhere/runs", "The specified bucket does not exist"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, RUN, "EndpointConnectionError"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, RUN, "NoCredentialsError"),
    ],
)
def test_an_error_of_the_store_is_one_of_ours_on_every_rank(
    bucket: Any, change: dict[str, str], url: str, message: str
) -> None:
    results = ec.run(fails, 2, "processes", args=({**environment(), **change}, url))
    for text, seconds in results:
        assert message in text
        assert seconds < 60
    assert results[0][0] == results[1][0]


def test_a_listing_that_is_refused_is_not_taken_for_an_empty_one(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error

    refusal = ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "PutObject")

    async def refuse(*_: object, **__: object) -> None:
        raise translate_boto_error(refusal)

    with monkeypatch.context() as patch:
        patch.setattr(s3fs.S3FileSystem, "_call_s3", refuse)
        for call in (lambda: ec.save(RUN, step=1, model=model_of(0)), lambda: ec.steps(RUN)):
            with pytest.raises(CheckpointError, match="PermissionError"):
                call()
