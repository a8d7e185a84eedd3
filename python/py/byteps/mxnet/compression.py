"""What is left out of gradients on the line."""

from byteps._codecs import Codec, Codecs

__all__ = ["Codec", "Compression"]


class Compression(Codecs):
    """The codecs by name. ``fp16`` sends half precision, as :meth:`wire_fp16` does."""

    fp16 = Codec("fp16")
