//! Why a process can't be configured as it was told to.

/// A configuration that cannot be used. Programs leave with [`ConfigError::EXIT_CODE`].
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A text that is no value of its knob.
    #[error("{origin} has the value '{value}'; allowed is {allowed}, for example {example}")]
    Value {
        /// `DMLC_NUM_WORKER` or `--workers`.
        origin: String,
        /// What it is set to.
        value: String,
        /// In words.
        allowed: String,
        /// As one would type it.
        example: String,
    },
    /// A knob that has no default and was not set.
    #[error("{variable} is not set: {purpose}; for example {example}")]
    Missing {
        /// Its name.
        variable: &'static str,
        /// What it would say.
        purpose: &'static str,
        /// As one would type it.
        example: &'static str,
    },
    /// Values that contradict each other.
    #[error("{problem}; {remedy}")]
    Conflict {
        /// Names every value that takes part.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// The command line has a flag that we do not know, or the like.
    #[error("{0}")]
    CommandLine(String),
}

impl ConfigError {
    /// With which programs leave.
    pub const EXIT_CODE: i32 = 2;

    pub(super) fn conflict(problem: String, remedy: String) -> ConfigError {
        ConfigError::Conflict { problem, remedy }
    }

    pub(super) fn missing(
        variable: &'static str,
        purpose: &'static str,
        example: &'static str,
    ) -> ConfigError {
        ConfigError::Missing { variable, purpose, example }
    }
}
