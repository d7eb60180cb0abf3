"""``python -m e2e_fp8.cli``."""

import sys

from e2e_fp8.cli.main import main

sys.exit(main())
