"""`python -m worker`."""

import os
import signal
import sys

# Until the worker has its own way to end, it holds nothing; as process 1 of a container it would
# not end at all.
signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))

from worker.main import main  # noqa: E402 - the import is most of the start

sys.exit(main())
