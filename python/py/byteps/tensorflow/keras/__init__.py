"""Training with Keras as TensorFlow has it (``tf.keras``).

The same as :mod:`byteps.keras`, under BytePS's other name.
"""

from byteps.errors import ConfigError
from byteps.keras import *  # noqa: F403
from byteps.keras import __all__ as __all__
from byteps.keras._exchange import BACKEND

if BACKEND != "tensorflow":
    raise ConfigError(
        f"byteps.tensorflow.keras: Keras runs on '{BACKEND}': set KERAS_BACKEND=tensorflow, or "
        "import byteps.keras"
    )
