"""What the background process runs: python -m kernelwright.calibration."""

import os

from ..ops import ways
from . import calibrate, verdicts

if __name__ == "__main__":
    os.nice(19)
    ways.keep(verdicts(calibrate()))
