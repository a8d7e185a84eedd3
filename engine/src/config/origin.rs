//! Whence the value of a setting came: what warnings, refusals and the printed configuration say.

/// A value and whence it came.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Source {
    /// The variable, or the flag of a row that has none.
    pub name: &'static str,
    /// As text; a secret only says that it is set.
    pub value: String,
    /// Whence.
    pub origin: Origin,
}

/// Whence a value came.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// This variable, which may be an alias.
    Variable(&'static str),
    /// This flag.
    Flag(&'static str),
    /// Nobody set it, and another value changed it.
    Implied,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::Variable(name) => write!(f, "variable {name}"),
            Origin::Flag(name) => write!(f, "flag --{name}"),
            Origin::Implied => f.write_str("implied by another value"),
        }
    }
}
