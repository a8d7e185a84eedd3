"""Gradient aggregation through CPU servers.

``import byteps.torch as bps`` is where a training script starts; :mod:`byteps.common` is what all
frameworks share, :mod:`byteps.errors` what can go wrong.
"""

__all__ = ["__version__"]

__version__: str


def __getattr__(name: str) -> str:
    # The engine is loaded when it is first wanted: torch imports a module of this package in every
    # program (`_autoload`).
    if name == "__version__":
        from byteps._native import __version__

        return __version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
