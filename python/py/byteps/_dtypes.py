"""The types that the engine computes with, by the names that arrays and tensors give them."""

from __future__ import annotations

from byteps.errors import TensorError

#: What the engine calls them.
DTYPES = {
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "bfloat16": "bf16",
    "uint8": "u8",
    "int8": "i8",
    "int32": "i32",
    "int64": "i64",
}


def summed(dtype: str, what: str) -> str:
    """What the engine calls the type of ``what``, or the error that says which can be summed."""
    known = DTYPES.get(dtype)
    if known is None:
        raise TensorError(
            f"push_pull of {what}: the servers do not sum {dtype} (they sum "
            f"{', '.join(DTYPES)}): cast it to one of them"
        )
    return known
