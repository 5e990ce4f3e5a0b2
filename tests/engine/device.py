"""The device of the engine's tests: `TANDEM_TEST_DEVICE=cuda` runs them on a GPU."""

import os
from typing import Final

DEVICE: Final = os.environ.get("TANDEM_TEST_DEVICE", "cpu")
