//! The one mapping from the engine's errors to the classes of `byteps.errors`.

use bps_worker::Error;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyType;

/// The Python exception for an error of the engine.
pub fn from_engine(error: &Error) -> PyErr {
    let class = match error {
        Error::Config(_) => "ConfigError",
        Error::Start(_) => "StartError",
        Error::Mismatch(_) => "MismatchError",
        Error::PeerDied(_) => "PeerDiedError",
        Error::Corrupt(_) => "CorruptionError",
        Error::Stalled(_) => "StallError",
        Error::Timeout(_) => "WaitTimeoutError",
        Error::Closed(_) => "NotInitializedError",
        _ => "BytePSError",
    };
    raise(class, error.to_string())
}

/// An exception of class `byteps.errors.<class>`; a plain `RuntimeError` where that module cannot
/// be imported.
pub fn raise(class: &str, message: impl Into<String>) -> PyErr {
    let message = message.into();
    Python::attach(|py| {
        let found = py
            .import("byteps.errors")
            .and_then(|module| module.getattr(class))
            .and_then(|class| Ok(class.cast_into::<PyType>()?));
        match found {
            Ok(class) => PyErr::from_type(class, (message,)),
            Err(_) => PyRuntimeError::new_err(message),
        }
    })
}
