"""`make gpu`, `python -m tests.gpu`: see `suite`."""

import sys

from tests.gpu.suite import main

sys.exit(main())  # not here: processes of the checks import their bodies, which they cannot from a __main__
