//! The shape of a tensor, as the ranks compare it. Part of every declaration.
//!
//! Invariant: it has at most [`DIMENSIONS_MAX`] dimensions, and its elements can be counted; what a
//! peer sends is held to this when it is decoded.

use crate::limits::DIMENSIONS_MAX;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Sizes of a tensor's dimensions, the outermost first; none for a scalar.
///
/// A caller that knows an element count and no shape declares one dimension of that size
/// (`TensorShape::from(count)`), and compares equal to exactly that.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "Vec<u64>", into = "Vec<u64>")]
pub struct TensorShape(Box<[u64]>);

/// Why a list of sizes is no shape.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ShapeError {
    /// It is too long.
    #[error("it has {0} dimensions, at most {DIMENSIONS_MAX} are possible: reshape it")]
    Dimensions(usize),
    /// Its product is too large.
    #[error("its elements cannot be counted in 64 bits: check its size")]
    Elements,
}

impl TensorShape {
    /// The shape with these dimensions.
    ///
    /// # Errors
    /// [`ShapeError`] for too many dimensions, or elements beyond counting.
    pub fn new(dimensions: Vec<u64>) -> Result<TensorShape, ShapeError> {
        if dimensions.len() > DIMENSIONS_MAX {
            return Err(ShapeError::Dimensions(dimensions.len()));
        }
        let empty = dimensions.contains(&0);
        let count = dimensions.iter().try_fold(1u64, |count, size| count.checked_mul(*size));
        if !empty && count.is_none() {
            return Err(ShapeError::Elements);
        }
        Ok(TensorShape(dimensions.into()))
    }

    /// Elements of a tensor of this shape.
    #[must_use]
    pub fn count(&self) -> u64 {
        // Only a shape with an empty dimension may overflow on the way.
        if self.0.contains(&0) { 0 } else { self.0.iter().product() }
    }
}

impl From<u64> for TensorShape {
    /// One dimension of so many elements.
    fn from(count: u64) -> TensorShape {
        TensorShape([count].into())
    }
}

impl TryFrom<Vec<u64>> for TensorShape {
    type Error = ShapeError;

    fn try_from(dimensions: Vec<u64>) -> Result<TensorShape, ShapeError> {
        TensorShape::new(dimensions)
    }
}

impl From<TensorShape> for Vec<u64> {
    fn from(shape: TensorShape) -> Vec<u64> {
        shape.0.into()
    }
}

impl fmt::Display for TensorShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (index, size) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{size}")?;
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(text: &str) -> Result<TensorShape, serde_json::Error> {
        serde_json::from_str(text)
    }

    #[test]
    fn a_shape_counts_prints_and_travels() {
        let cases: [(&[u64], u64, &str); 5] = [
            (&[], 1, "[]"),
            (&[6], 6, "[6]"),
            (&[2, 3], 6, "[2, 3]"),
            (&[4, 0, 2], 0, "[4, 0, 2]"),
            (&[u64::MAX, u64::MAX, 0], 0, "[18446744073709551615, 18446744073709551615, 0]"),
        ];
        for (dimensions, count, text) in cases {
            let shape = TensorShape::new(dimensions.to_vec()).unwrap();
            assert_eq!((shape.count(), shape.to_string().as_str()), (count, text));
            assert_eq!(decode(&serde_json::to_string(&shape).unwrap()).unwrap(), shape);
        }
        assert_eq!(TensorShape::from(6), TensorShape::new(vec![6]).unwrap());
    }

    #[test]
    fn what_a_peer_sends_is_bounded() {
        let ones = |count| serde_json::to_string(&vec![1u64; count]).unwrap();
        assert_eq!(decode(&ones(DIMENSIONS_MAX)).unwrap().count(), 1);
        let error = decode(&ones(DIMENSIONS_MAX + 1)).unwrap_err().to_string();
        assert!(error.contains("it has 65 dimensions, at most 64"), "{error}");
        let error = decode("[4294967296, 4294967296]").unwrap_err().to_string();
        assert!(error.contains("cannot be counted"), "{error}");
    }
}
