"""The Keras of this process: the package ``keras``, or with ``TF_USE_LEGACY_KERAS=1`` Keras 2 of
the package ``tf_keras``, as TensorFlow has it then."""

from __future__ import annotations

import os
import re
from typing import Any

from byteps.errors import ConfigError

__all__ = ["IS_KERAS_2", "IS_TF_KERAS", "hint", "keras"]

#: The oldest release that this was tried with.
_FLOOR = (2, 15)

#: As TensorFlow reads it.
IS_TF_KERAS = os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")

if IS_TF_KERAS:
    try:
        import tf_keras as keras
    except ImportError as error:
        raise ConfigError(
            "byteps.keras: TF_USE_LEGACY_KERAS is set, and the package tf_keras is not installed: "
            "install the release that is named as TensorFlow's, or unset the variable"
        ) from error
else:
    try:
        import keras
    except ImportError as error:
        if error.name == "keras":
            raise
        raise ConfigError(
            f"byteps.keras: Keras cannot be imported ({error}). It runs on TensorFlow unless "
            "KERAS_BACKEND, or its own file of settings, names another back end: install the one "
            "that it is to run on, or set KERAS_BACKEND to tensorflow, jax or torch"
        ) from error


def _release() -> tuple[int, int]:
    """Raises for one that is not known, before the modules beside this one ask Keras for what it
    may not have."""
    own = getattr(keras, "__version__", "")
    numbers = re.match(r"(\d+)\.(\d+)", own)
    floor = ".".join(map(str, _FLOOR))
    if numbers is None:
        raise ConfigError(
            f"byteps.keras: Keras calls itself {own!r}, which is no release: install one of "
            f"{floor} or later"
        )
    found = int(numbers[1]), int(numbers[2])
    if found < _FLOOR:
        raise ConfigError(
            f"byteps.keras needs Keras {floor} or later, and this is {own}: install a later one"
        )
    return found


#: Whether this is Keras 2, which TensorFlow 2.15 has.
IS_KERAS_2 = _release() < (3, 0)


def hint(thing: Any) -> str:
    """What to do about a thing that is of the other Keras, or nothing."""
    roots = {base.__module__.split(".")[0] for base in type(thing).__mro__}
    if not IS_TF_KERAS and "tf_keras" in roots:
        return (
            ". This one is of tf_keras: set TF_USE_LEGACY_KERAS=1 before TensorFlow is imported, "
            "so that tf.keras is tf_keras, too"
        )
    if IS_TF_KERAS and "keras" in roots:
        return ". This one is of Keras 3: unset TF_USE_LEGACY_KERAS, or take it from tf.keras"
    return ""
