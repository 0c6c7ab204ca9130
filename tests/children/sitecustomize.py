"""What a Python process that a test starts does first; see the package."""

import gc

gc.set_threshold(100_000)  # instead of 700 objects
