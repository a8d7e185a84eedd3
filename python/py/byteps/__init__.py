"""Gradient aggregation through CPU servers.

``import byteps.torch as bps`` is where a training script starts; :mod:`byteps.common` is what all
frameworks share, :mod:`byteps.errors` what can go wrong.
"""

from byteps._native import __version__

__all__ = ["__version__"]
