from collections.abc import Iterator

import pytest

import echelon as ec
from echelon.cli import doctor


def fails(world: ec.World) -> int:
    raise RuntimeError("no memory\nat all")


def test_this_machine_has_all_that_is_essential() -> None:
    findings = {finding.name: finding for finding in doctor.findings()}
    missing = [
        name for name, finding in findings.items() if finding.verdict is doctor.Verdict.MISSING
    ]
    assert missing == []
    assert {"torch", "cores", "shared memory", "free port", "torch.distributed"} <= set(findings)
    assert findings["2 ranks as threads"].value == "all-reduce gives the right sum"


def test_something_essential_that_is_missing_gives_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def findings() -> Iterator[doctor.Finding]:
        yield doctor.Finding(name="torch", value="2.13")
        yield doctor.Finding(name="port", value="none", verdict=doctor.Verdict.MISSING)

    monkeypatch.setattr(doctor, "findings", findings)
    assert doctor.examine() == 1
    assert "missing" in capsys.readouterr().out


def test_a_version_that_is_too_old_is_missing() -> None:
    finding = doctor._version("torch", "2.10.1+cpu", (2, 11))
    assert (finding.verdict, finding.advice) == (doctor.Verdict.MISSING, "install 2.11 or newer")


def test_ranks_that_cannot_talk_are_a_finding_and_no_crash() -> None:
    finding = doctor._trial("threads", fails)
    assert finding.verdict is doctor.Verdict.MISSING
    assert finding.value == "RuntimeError: no memory"
