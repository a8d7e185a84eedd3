"""``python -m byteps.launch`` is ``bpslaunch``."""

from byteps._programs import launch as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
