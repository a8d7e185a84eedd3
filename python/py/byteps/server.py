"""Importing this module *runs* the server or the scheduler, and returns when the job is over.

That is how BytePS does it: ``DMLC_ROLE=server ... python -c "import byteps.server"``, or the same
with ``python -m byteps.server``. All settings come from the environment. A failure ends the process
with the status of ``bps-server``.
"""

from byteps._programs import run_role as run

__all__ = ["run"]

run()
