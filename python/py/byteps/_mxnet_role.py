"""What ``import byteps.mxnet`` is in the servers and the scheduler of MXNet's launcher.

That starts the same script for every role, and ``import mxnet`` is MXNet's own server or scheduler
where ``DMLC_ROLE`` says so. This comes before it: importing this module runs ours, and ends the
process when the job is over. In a worker it does nothing.
"""

import os
import sys

from byteps import _programs

if os.environ.get("DMLC_ROLE", "").lower() in ("scheduler", "server"):
    _programs.run_role()
    sys.exit()
