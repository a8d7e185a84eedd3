//! The one mapping from the engine's errors to the classes of `byteps.errors`.
//!
//! Frameworks that run compiled programs know texts alone: errors go through them as
//! `byteps.errors.CLASS: MESSAGE`, of which Python makes the class again.

#![forbid(unsafe_code)]

use bps_worker::Error;
use bps_worker::error::Details;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The last error of the engine that was raised, or given to a framework as a text.
static LAST: Mutex<Option<Error>> = Mutex::new(None);

/// The name of the class in `byteps.errors` for an error of the engine.
fn class_of(error: &Error) -> &'static str {
    match error {
        Error::Config(_) => "ConfigError",
        Error::Start(_) => "StartError",
        Error::Mismatch(_) | Error::Disagree(_) => "MismatchError",
        Error::PeerDied(_) => "PeerDiedError",
        Error::Corrupt(_) => "CorruptionError",
        Error::Stalled(_) => "StallError",
        Error::Timeout(_) => "WaitTimeoutError",
        Error::Closed(_) => "NotInitializedError",
        Error::Refused(_) => "BytePSError",
    }
}

/// The Python exception for an error of the engine, with its data as attributes.
pub fn from_engine(error: &Error) -> PyErr {
    // A program of a framework may be what asked: then only its text goes on.
    *LAST.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.clone());
    let raised = raise(class_of(error), error.to_string());
    // An exception without its attributes is still the right one: its class has them as None.
    let _ = Python::attach(|py| describe(raised.value(py).as_any(), error.details()));
    raised
}

/// Sets the attributes that `byteps.errors.BytePSError` documents.
fn describe(exception: &Bound<'_, PyAny>, details: Details) -> PyResult<()> {
    let Details { ranks, server, host, pid, tensor, round, waited, frameworks } = details;
    let ranks: Vec<u32> = ranks.into_iter().map(|rank| rank.0).collect();
    exception.setattr("rank", ranks.first().copied())?;
    exception.setattr("ranks", PyTuple::new(exception.py(), ranks)?)?;
    let frameworks: BTreeMap<u32, String> =
        frameworks.into_iter().map(|(rank, name)| (rank.0, name)).collect();
    exception.setattr("frameworks", frameworks)?;
    exception.setattr("server", server)?;
    exception.setattr("host", host)?;
    exception.setattr("pid", pid)?;
    exception.setattr("tensor", tensor)?;
    exception.setattr("round", round)?;
    exception.setattr("waited_s", waited.map(|waited| waited.as_secs_f64()))
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

/// The text that a framework gets for an error of the engine.
pub fn of_engine(cause: &Error) -> String {
    *LAST.lock().unwrap_or_else(PoisonError::into_inner) = Some(cause.clone());
    format!("byteps.errors.{}: {cause}", class_of(cause))
}

/// The text that a framework gets for an exception.
pub fn exception(py: Python<'_>, error: &PyErr) -> String {
    let kind = error.get_type(py);
    let name = kind.fully_qualified_name().map_or_else(|_| "Exception".into(), |it| it.to_string());
    format!("{name}: {}", error.value(py))
}

/// [`exception`] on a thread that has no interpreter.
pub fn exception_alone(error: &PyErr) -> String {
    Python::try_attach(|py| exception(py, error)).unwrap_or_else(|| error.to_string())
}

/// Raises the last error of the engine again, with its attributes, if
/// `text` contains it.
#[pyfunction]
pub fn raise_again(text: &str) -> PyResult<()> {
    let last = LAST.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match last {
        Some(cause) if text.contains(&cause.to_string()) => Err(from_engine(&cause)),
        _ => Ok(()),
    }
}
