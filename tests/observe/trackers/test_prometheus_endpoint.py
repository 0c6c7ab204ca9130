import http.client
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import echelon as ec
from echelon.observe.trackers import prometheus_endpoint
from echelon.observe.trackers.prometheus_endpoint import PrometheusEndpoint, address
from echelon.observe.trackers.tracker import TrackedRun
from tests.observe.trackers.test_prometheus import samples


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[PrometheusEndpoint]:
    endpoint = PrometheusEndpoint(TrackedRun(folder=tmp_path, name="gpt"), "0")
    yield endpoint
    endpoint.close()


def ask(
    endpoint: PrometheusEndpoint, path: str, method: str = "GET", **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(endpoint.address, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


@pytest.mark.slow
def test_the_newest_values_are_answered(endpoint: PrometheusEndpoint) -> None:
    assert ask(endpoint, "/metrics")[:2] == (200, "")
    endpoint.log({"train/loss": 3.0}, 1)
    endpoint.log({"train/loss": 2.5}, 2)
    status, text, headers = ask(endpoint, "/metrics")
    assert status == 200
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert samples(text)["echelon_train_loss"] == ({"run": "gpt"}, 2.5)
    assert samples(text)["echelon_step"][1] == 2


@pytest.mark.slow
def test_nothing_else_is_answered(endpoint: PrometheusEndpoint) -> None:
    assert ask(endpoint, "/")[0] == 404
    assert ask(endpoint, "/../etc/passwd")[0] == 404
    assert ask(endpoint, "/metrics", "POST")[0] == 501
    assert "Python" not in str(ask(endpoint, "/metrics")[2])


@pytest.mark.slow
def test_a_client_that_sends_nothing_is_dropped_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_endpoint, "REQUEST_S", 0.2)
    endpoint = PrometheusEndpoint(TrackedRun(folder=tmp_path, name="gpt"), "0")
    try:
        host, port = address(endpoint.address)
        with socket.create_connection((host, port), timeout=10) as silent:
            assert ask(endpoint, "/metrics")[0] == 200
            assert silent.recv(1) == b""
    finally:
        endpoint.close()


@pytest.mark.slow
def test_slow_and_reset_connections_take_few_descriptors_and_threads_and_print_nothing(
    endpoint: PrometheusEndpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    place = address(endpoint.address)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    most = prometheus_endpoint.MOST_CONNECTIONS
    clients = []
    for i in range(3 * most):
        client = socket.create_connection(place, timeout=10)
        client.send(b"GET /met")
        if i % 3 == 0:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        else:
            clients.append(client)
    assert ask(endpoint, "/metrics")[0] == 200
    taken = len(os.listdir("/proc/self/fd")) - descriptors - len(clients)
    assert taken <= most + 1
    assert threading.active_count() - threads <= most + 1
    for client in clients:
        client.close()
    assert ask(endpoint, "/metrics")[0] == 200
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_connection_ends_after_its_time_however_it_drips(
    endpoint: PrometheusEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_endpoint, "REQUEST_S", 0.3)
    with socket.create_connection(address(endpoint.address), timeout=10) as client:
        start = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT011 (a reset, or a broken pipe)
            while time.monotonic() - start < 10:
                client.send(b"G")
                time.sleep(0.05)


def test_it_listens_on_loopback_unless_another_host_is_given() -> None:
    assert address(None) == ("127.0.0.1", 9464)
    assert address("8000") == ("127.0.0.1", 8000)
    assert address("localhost:8000") == ("127.0.0.1", 8000)
    assert address("0.0.0.0:8000") == ("0.0.0.0", 8000)


@pytest.mark.parametrize("place", ["port", "1:2:3", "host.example:80", "70000", "-1", "::1"])
def test_what_is_no_address_is_refused(place: str) -> None:
    with pytest.raises(ec.ArgumentError, match="is no address"):
        address(place)


@pytest.mark.slow
def test_the_port_and_the_thread_go_with_it(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    endpoint = PrometheusEndpoint(TrackedRun(folder=tmp_path, name="gpt"), "0")
    assert ask(endpoint, "/metrics")[0] == 200
    endpoint.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address(endpoint.address), timeout=10)
    assert {thread for thread in threading.enumerate() if "endpoint" in thread.name} <= before


@pytest.mark.slow
def test_each_rank_has_a_port_if_each_is_tracked(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    endpoint = PrometheusEndpoint(TrackedRun(folder=tmp_path, name="gpt", rank=1), str(port - 1))
    endpoint.close()
    assert endpoint.address == f"127.0.0.1:{port}"
