"""``python -m dpkernels`` is the command ``dpkernels``."""

import sys

from dpkernels.cli import main

sys.exit(main())
