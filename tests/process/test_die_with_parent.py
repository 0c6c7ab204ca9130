import os
import signal
import subprocess
import sys
from pathlib import Path

from echelon.process import die_with_parent
from tests.processes import has_ended, wait_until

TETHERED = [sys.executable, "-I", "-S", die_with_parent.__file__]


def test_a_program_started_through_it_ends_with_its_parent() -> None:
    parent = f"""
import os, signal, subprocess
child = subprocess.Popen({TETHERED} + [str(os.getpid()), "/bin/sh", "-c", "echo $$; exec sleep 90"])
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            shell = int(process.stdout.readline())  # becomes the command, by the number it had
            assert not has_ended(shell)
        finally:
            process.kill()
    wait_until(lambda: has_ended(shell), limit_s=10)


def test_a_program_whose_parent_has_ended_before_does_not_start() -> None:
    done = subprocess.run([*TETHERED, "0", "/bin/echo", "started"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_a_command_keeps_its_arguments_and_its_exit_code() -> None:
    command = ["/bin/sh", "-c", 'echo "$0"; exit 7', "an argument"]
    done = subprocess.run([*TETHERED, str(os.getpid()), *command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "an argument\n")


def test_a_signal_other_than_kill_can_be_asked_for() -> None:
    code = f"""
import signal, sys
sys.path.insert(0, {str(Path(die_with_parent.__file__).parents[2])!r})
from echelon.process.die_with_parent import signal_on_death_of_parent
signal_on_death_of_parent(0, signal.SIGUSR2)
"""
    done = subprocess.run([sys.executable, "-c", code])
    assert done.returncode == -signal.SIGUSR2
