"""``python -m echelon.testing.device``: compile the device now, and not when it is first used."""

from echelon.errors import UnsupportedError
from echelon.errors.message_text import say
from echelon.testing.device.native import device_library

try:
    device_library()
except UnsupportedError as error:
    say(f"echelon: {error}")
